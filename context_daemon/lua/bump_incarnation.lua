-- bump_incarnation: seen -> seen + 1, once, also where the store forgot that it had come as far as `seen`.
-- KEYS incarnation | ARGV seen
-- Reads and writes it. Idempotent: compare and set. Answers the one in force.
local held = tonumber(redis.call('GET', KEYS[1]) or '1')
if held <= tonumber(ARGV[1]) then
  held = tonumber(ARGV[1]) + 1
  redis.call('SET', KEYS[1], int(held))
end
return held
