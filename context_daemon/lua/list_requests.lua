-- list_requests: rows of the `ready` or `leased` index with what placement and the timers need, at one instant.
-- KEYS meta | ARGV index, limit (negative: all), then field, ...
-- Reads meta, ready or leased, r:<rid>, t:<rid>. Writes nothing. Answers per request: rid, tokens, fields in that order.
local base = base_of(KEYS[1])
local limit = tonumber(ARGV[2])
local fields = {unpack(ARGV, 3)}
local rows = {}
if limit ~= 0 then
  for _, rid in ipairs(redis.call('ZRANGE', base .. ARGV[1], 0, limit < 0 and -1 or limit - 1)) do
    rows[#rows + 1] = {rid, redis.call('STRLEN', base .. 't:' .. rid) / 4, redis.call('HMGET', base .. 'r:' .. rid, unpack(fields))}
  end
end
return {redis.call('HGET', KEYS[1], 'started_at') or '0', rows}
