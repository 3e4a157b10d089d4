-- requeue: LEASED under that token -> READY with epoch + 1, so that the old owner is fenced at once.
-- KEYS meta | ARGV term, cause, blamed ('1' | '0'), then per request: rid, incarnation, epoch
-- Reads r:<rid>, t:<rid>; writes meta (term), r:<rid>, ready, leased, intr. Idempotent: what is READY at epoch + 1 has
-- moved already and only counts. Answers how many moved.
local base = base_of(KEYS[1])
local stale = stale_term(KEYS[1], ARGV[1])
if stale then
  return stale
end
local now = now_us()
local moved = 0
for i = 4, #ARGV, 3 do
  local rid, inc, epoch = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local rkey = base .. 'r:' .. rid
  local r = redis.call('HMGET', rkey, 'state', 'inc', 'epoch', 'line', 'worker')
  if r[1] == 'leased' and r[2] == inc and r[3] == epoch then
    -- READY takes epoch + 1, the next lease one more.
    record_interruption(base, rid, tonumber(epoch) + 2, ARGV[2], ARGV[3], '', now)
    redis.call('HSET', rkey, 'state', 'ready', 'epoch', int(tonumber(epoch) + 1), 'avoid', r[5] or '', 'worker', '',
      'ready_since', int(now))
    redis.call('ZREM', base .. 'leased', rid)
    redis.call('ZADD', base .. 'ready', r[4], rid)
    moved = moved + 1
  elseif r[1] == 'ready' and r[2] == inc and tonumber(r[3]) == tonumber(epoch) + 1 then
    moved = moved + 1
  end
end
return moved
