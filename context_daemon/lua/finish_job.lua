-- finish_job: when every line is terminal, IN_PROGRESS -> COMPLETED and CANCELLING -> CANCELLED.
-- KEYS meta | ARGV term
-- Reads meta, ready, leased; writes meta. Idempotent: a terminal job is answered as it is.
local base = base_of(KEYS[1])
local stale = stale_term(KEYS[1], ARGV[1])
if stale then
  return stale
end
local next_states = {in_progress = 'completed', finalizing = 'completed', cancelling = 'cancelled'}
local m = redis.call('HMGET', KEYS[1], 'state', 'total', 'completed', 'failed')
local open = redis.call('ZCARD', base .. 'ready') + redis.call('ZCARD', base .. 'leased')
if next_states[m[1]] and open == 0 and m[3] + m[4] == tonumber(m[2]) then
  redis.call('HSET', KEYS[1], 'state', next_states[m[1]], 'finished_at', int(now_us()))
end
return redis.call('HGETALL', KEYS[1])
