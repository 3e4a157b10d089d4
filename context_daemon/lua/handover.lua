-- handover: the cut-over. Owned under the token with exactly `length` tokens: epoch + 1 goes to the target, or to READY.
-- KEYS meta | ARGV rid, incarnation, epoch, length, wm positions ('' none), wm first page, wm layout, target, cause, blamed
-- Reads meta, r:<rid>, t:<rid>; writes r:<rid>, ready, leased, intr. Idempotent: epoch + 1 under the same target is the
-- repeat and is answered again. Answers 1 if moved, 0 if the condition fails.
local base = base_of(KEYS[1])
local rid, inc, epoch, length, wm, first_page, layout, target, cause, blamed = unpack(ARGV)
local rkey = base .. 'r:' .. rid
local m = redis.call('HMGET', KEYS[1], 'state', 'inc')
local r = redis.call('HMGET', rkey, 'state', 'inc', 'epoch', 'worker', 'line', 'prompt_tokens')
if not r[1] then
  return 0
end
local taken = tonumber(epoch) + 1
if r[2] == inc and tonumber(r[3]) == taken and r[4] == target and (target ~= '' or r[1] == 'ready') then
  return r[1] == 'cancelled' and 0 or 1
end
local there = redis.call('STRLEN', base .. 't:' .. rid) / 4
if r[1] ~= 'leased' or inc ~= m[2] or inc ~= r[2] or epoch ~= r[3] or there ~= tonumber(length) then
  return 0
end
if target ~= '' and m[1] ~= 'in_progress' then
  return 0
end
local now = now_us()
if wm ~= '' then
  advance_watermark(rkey, tonumber(epoch), r[6] + there, tonumber(wm), tonumber(first_page), layout)
end
if target ~= '' then
  record_interruption(base, rid, taken, cause, blamed, target, now)
  redis.call('HSET', rkey, 'epoch', int(taken), 'worker', target, 'leased_at', int(now))
  redis.call('HDEL', rkey, 'last_at')
else
  record_interruption(base, rid, taken + 1, cause, blamed, '', now)
  redis.call('HSET', rkey, 'state', 'ready', 'epoch', int(taken), 'avoid', r[4], 'worker', '', 'ready_since', int(now))
  redis.call('ZREM', base .. 'leased', rid)
  redis.call('ZADD', base .. 'ready', r[5], rid)
end
return 1
