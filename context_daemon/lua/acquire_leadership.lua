-- acquire_leadership: the fenced lease of the orchestrator.
-- KEYS leader | ARGV holder, ttl in microseconds
-- Reads and writes leader. Idempotent: the last holder renews under the same term. Answers the term, or 0 while another holds it.
local now = now_us()
local l = redis.call('HMGET', KEYS[1], 'holder', 'term', 'until')
local term = tonumber(l[2] or '0')
if l[1] ~= ARGV[1] then
  if l[1] and tonumber(l[3]) > now then
    return 0
  end
  term = term + 1
end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'term', int(term), 'until', int(now + tonumber(ARGV[2])))
return term
