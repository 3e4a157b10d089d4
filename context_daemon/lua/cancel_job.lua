-- cancel_job: IN_PROGRESS -> CANCELLING; from here on lease and handover refuse its requests.
-- KEYS meta | ARGV -
-- Reads and writes meta. Idempotent: CANCELLING and terminal jobs are answered as they are.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  return redis.error_reply('NOJOB no such job')
end
if state == 'validating' then
  return redis.error_reply('BADSTATE the job is still validating: it cannot be cancelled yet')
end
if state == 'in_progress' then
  redis.call('HSET', KEYS[1], 'state', 'cancelling')
end
return redis.call('HGETALL', KEYS[1])
