-- cancel_requests: give requests of a CANCELLING job their error line; a LEASED one's owner is fenced by an epoch bump.
-- KEYS meta | ARGV term, then per request: rid, payload
-- Reads meta, r:<rid>; writes r:<rid>, ready, leased, results, meta's counts. Idempotent: terminal requests are left.
-- Answers how many READY or LEASED requests are left.
local base = base_of(KEYS[1])
local stale = stale_term(KEYS[1], ARGV[1])
if stale then
  return stale
end
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'validating' or state == 'in_progress' or state == 'finalizing' then
  return redis.error_reply('BADSTATE the job is ' .. state .. ': cancel it first')
end
local now = now_us()
for i = 2, #ARGV, 2 do
  local rkey = base .. 'r:' .. ARGV[i]
  local r = redis.call('HMGET', rkey, 'state', 'line')
  if r[1] == 'ready' or r[1] == 'leased' then
    redis.call('HINCRBY', rkey, 'epoch', 1)
    terminate(base, ARGV[i], r[2], 'cancelled', '0', ARGV[i + 1], now)
  end
end
return redis.call('ZCARD', base .. 'ready') + redis.call('ZCARD', base .. 'leased')
