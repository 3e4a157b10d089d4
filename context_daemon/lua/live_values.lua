-- live_values: what has not expired in a fleet hash (workers, notices); what has is dropped.
-- KEYS hash | ARGV -
-- Reads and writes the hash. Idempotent.
local now = now_us()
local all = redis.call('HGETALL', KEYS[1])
local live = {}
for i = 1, #all, 2 do
  local expiry, value = string.match(all[i + 1], '^(%d+):(.*)$')
  if tonumber(expiry) > now then
    live[#live + 1] = value
  else
    redis.call('HDEL', KEYS[1], all[i])
  end
end
return live
