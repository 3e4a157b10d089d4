"""The gRPC server: services, health, reflection, limits."""

from __future__ import annotations

import time

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # missing in the stubs
from grpc_reflection.v1alpha import reflection

from context_daemon.observability import get_logger
from orchestrator.api.admin import AdminServicer
from orchestrator.api.fleet_view import FleetView
from orchestrator.api.jobs import JobsServicer
from orchestrator.context_view import ContextView
from orchestrator.jobs.service import JobService
from protos import admin_pb2, admin_pb2_grpc, jobs_pb2, jobs_pb2_grpc

log = get_logger()

_OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),  # files come in chunks
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),  # a second orchestrator on the port must fail, not share
    # Clients ping through quiet streams to notice a machine that vanished; gRPC's default takes that for an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


async def serve(listen: str, jobs: JobService, fleet: FleetView, kept: ContextView) -> grpc.aio.Server:
    """Start serving on `host:port`. Raises OSError, by name, if the port cannot be had."""
    server = grpc.aio.server(options=_OPTIONS)
    jobs_pb2_grpc.add_JobsServiceServicer_to_server(JobsServicer(jobs, fleet, time.time), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(fleet, kept), server)
    names = [
        jobs_pb2.DESCRIPTOR.services_by_name["JobsService"].full_name,
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    ]
    checks = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: is another program using the port? ({error})") from error
    await server.start()
    for name in ("", *names):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    log.info("listening", address=listen)
    return server
