-- put_expiring: set a field of a fleet hash (workers, notices) with its own expiry.
-- KEYS hash | ARGV field, value, ttl in seconds from now, least expiry in microseconds, only if new ('1' | '0')
-- Reads and writes the hash. Idempotent: the same value again, or nothing when it is kept. Answers 1 if it was not there.
local now = now_us()
local held = redis.call('HGET', KEYS[1], ARGV[1])
local live = held and tonumber(string.match(held, '^(%d+):')) > now
if live and ARGV[5] == '1' then
  return 0
end
local expiry = math.max(now + tonumber(ARGV[3]) * 1000000, tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], ARGV[1], int(expiry) .. ':' .. ARGV[2])
return live and 0 or 1
