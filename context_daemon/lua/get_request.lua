-- get_request: one request and its token log at one instant.
-- KEYS meta | ARGV rid
-- Reads r:<rid>, t:<rid>. Writes nothing. (Not MULTI: Redis 7.0 refuses that at its memory limit, reads included.)
local base = base_of(KEYS[1])
return {redis.call('HGETALL', base .. 'r:' .. ARGV[1]), redis.call('GET', base .. 't:' .. ARGV[1]) or ''}
