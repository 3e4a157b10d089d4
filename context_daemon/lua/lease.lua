-- lease: READY at that epoch -> LEASED with epoch + 1, under the incarnation in force.
-- KEYS meta | ARGV term, incarnation, then per request: rid, line, epoch, worker, numerics_class, exact
-- Reads meta, r:<rid>, t:<rid>; writes meta (term, inc), r:<rid>, ready, leased, intr. Idempotent: a repeat (same worker,
-- epoch + 1, no commit yet) is answered again and writes nothing. Answers index, incarnation, epoch of each lease.
local base = base_of(KEYS[1])
local stale = stale_term(KEYS[1], ARGV[1])
if stale then
  return stale
end
if tonumber(redis.call('HGET', KEYS[1], 'inc') or '1') < tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[1], 'inc', ARGV[2])
end
local m = redis.call('HMGET', KEYS[1], 'state', 'inc')
local now = now_us()
local granted = {}
for i = 3, #ARGV, 6 do
  local rid, line, epoch, worker, class, exact = unpack(ARGV, i, i + 5)
  local rkey = base .. 'r:' .. rid
  local r = redis.call('HMGET', rkey, 'state', 'epoch', 'worker', 'inc', 'commit_epoch', 'nclass')
  local taken = tonumber(epoch) + 1
  if r[1] == 'ready' and r[2] == epoch and m[1] == 'in_progress' then
    redis.call('HSET', rkey, 'state', 'leased', 'epoch', int(taken), 'inc', m[2], 'worker', worker, 'lclass', class,
      'leased_at', int(now))
    redis.call('HDEL', rkey, 'last_at')
    if exact == '0' or (r[6] and r[6] ~= '' and r[6] ~= class) then
      redis.call('HSET', rkey, 'exact', '0')
    end
    redis.call('ZREM', base .. 'ready', rid)
    redis.call('ZADD', base .. 'leased', line, rid)
    complete_interruption(base, rid, taken, {target = worker, leased_at = now})
    granted[#granted + 1] = {(i - 3) / 6, m[2], int(taken)}
  elseif r[1] == 'leased' and tonumber(r[2]) == taken and r[3] == worker and r[4] == m[2]
    and tonumber(r[5] or '0') ~= taken then
    granted[#granted + 1] = {(i - 3) / 6, r[4], int(taken)}
  end
end
return granted
