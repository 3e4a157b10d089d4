-- fail_job: VALIDATING -> FAILED; its requests are deleted, a bounded number per call.
-- KEYS meta | ARGV error, limit
-- Reads and writes meta, pending, r:<rid>. Idempotent: a FAILED job keeps its first error and goes on deleting.
-- Answers how many requests are left, then meta.
local base = base_of(KEYS[1])
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  return redis.error_reply('NOJOB no such job')
end
if state ~= 'validating' and state ~= 'failed' then
  return redis.error_reply('BADSTATE the job is ' .. state .. ': only one that is validating can fail')
end
if state == 'validating' then
  redis.call('HSET', KEYS[1], 'state', 'failed', 'error', ARGV[1], 'finished_at', int(now_us()))
end
local rids = redis.call('ZRANGE', base .. 'pending', 0, tonumber(ARGV[2]) - 1)
for _, rid in ipairs(rids) do
  redis.call('UNLINK', base .. 'r:' .. rid)
  redis.call('ZREM', base .. 'pending', rid)
end
return {redis.call('ZCARD', base .. 'pending'), redis.call('HGETALL', KEYS[1])}
