-- start_job: VALIDATING -> IN_PROGRESS with every pending request READY, by one rename.
-- KEYS meta | ARGV total
-- Reads and writes meta, pending, ready. Idempotent: a job past VALIDATING is answered as it is.
local base = base_of(KEYS[1])
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  return redis.error_reply('NOJOB no such job')
end
if state == 'failed' then
  return redis.error_reply('BADSTATE the job has failed: it cannot start')
end
if state == 'validating' then
  local there = redis.call('ZCARD', base .. 'pending')
  if there ~= tonumber(ARGV[1]) then
    return redis.error_reply('BADSTATE ' .. there .. ' requests are there, not ' .. ARGV[1])
  end
  if there > 0 then
    redis.call('RENAME', base .. 'pending', base .. 'ready')
  end
  redis.call('HSET', KEYS[1], 'state', 'in_progress', 'total', ARGV[1], 'started_at', int(now_us()))
end
return redis.call('HGETALL', KEYS[1])
