-- put_expiring: set a field of a fleet hash (workers, notices) with its own expiry.
-- KEYS hash | ARGV field, value, ttl in seconds from now, least expiry in microseconds
-- Reads and writes the hash. Idempotent: the same value again, its expiry counted anew. Answers 1 if it was not there.
local now = now_us()
local held = redis.call('HGET', KEYS[1], ARGV[1])
local live = held and tonumber(string.match(held, '^(%d+):')) > now
local expiry = math.max(now + tonumber(ARGV[3]) * 1000000, tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], ARGV[1], int(expiry) .. ':' .. ARGV[2])
return live and 0 or 1
