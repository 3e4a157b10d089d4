-- commit: a step's tokens of one job's requests, with watermarks, resume reports and finishes, under the owners' tokens.
-- KEYS meta | ARGV per request: rid, incarnation, epoch, position, tokens (packed int32), wm positions ('' none), wm first
--   page, wm layout, finish ('' | '1' ok | '0' error), payload, resume report (msgpack, '' none), kv_at ('' none)
-- Reads and writes meta's counts, r:<rid>, t:<rid>, leased, results, intr. Idempotent: tokens are compared where they
-- exist and only the missing tail is written and counted; the finish is guarded by the state; a repeated finish must
-- equal the line that is there. Answers status, length of each: 0 OK, 1 FENCED, 2 GAP, 3 DIVERGED, 4 the owner is ahead
-- of the store (which lost data).
local base = base_of(KEYS[1])
local job_inc = redis.call('HGET', KEYS[1], 'inc') or '0'
local now = now_us()

local function ahead(inc, epoch, held_inc, held_epoch)
  inc, epoch, held_inc, held_epoch = tonumber(inc), tonumber(epoch), tonumber(held_inc), tonumber(held_epoch)
  return inc > held_inc or (inc == held_inc and epoch > held_epoch)
end

local function commit(rid, inc, epoch, position, tokens, wm, first_page, layout, finish, payload, resume, kv_at)
  local rkey, tkey = base .. 'r:' .. rid, base .. 't:' .. rid
  local r = redis.call('HMGET', rkey, 'state', 'inc', 'epoch', 'line', 'commit_epoch', 'lclass', 'prompt_tokens', 'ridx')
  local length = redis.call('STRLEN', tkey) / 4
  if inc ~= job_inc or inc ~= r[2] or epoch ~= r[3] or r[1] == 'ready' then
    return {ahead(inc, epoch, r[2] or 0, r[3] or 0) and 4 or 1, length}
  end
  position = tonumber(position)
  if position > length then
    return {2, length}
  end
  local known = math.min(#tokens / 4, length - position)
  if known > 0 and redis.call('GETRANGE', tkey, position * 4, (position + known) * 4 - 1) ~= string.sub(tokens, 1, known * 4) then
    return {3, length}
  end
  local new = #tokens / 4 - known
  if finish ~= '' and position + #tokens / 4 < length then
    return {3, length}
  end
  if r[1] ~= 'leased' then
    if new > 0 then
      return {1, length}
    end
    local same = finish == '' or redis.call('LINDEX', base .. 'results', r[8]) == r[4] .. ':' .. finish .. ':' .. payload
    return {same and 0 or 3, length}
  end
  if new > 0 then
    redis.call('SETRANGE', tkey, length * 4, string.sub(tokens, known * 4 + 1))
    redis.call('HINCRBY', KEYS[1], 'output_tokens', new)
    redis.call('HSET', rkey, 'nclass', r[6] or '')
    length = length + new
  end
  if new > 0 or finish ~= '' then
    redis.call('HSET', rkey, 'last_at', int(now))
    if tonumber(r[5] or '0') ~= tonumber(epoch) then
      redis.call('HSET', rkey, 'commit_epoch', epoch)
      complete_interruption(base, rid, tonumber(epoch), {first_at = now})
    end
  end
  if resume ~= '' then
    complete_interruption(base, rid, tonumber(epoch), cmsgpack.unpack(resume))
  end
  if kv_at ~= '' then
    redis.call('HSET', rkey, 'kv_at', kv_at)
  end
  if wm ~= '' then
    advance_watermark(rkey, tonumber(epoch), r[7] + length, tonumber(wm), tonumber(first_page), layout)
  end
  if finish ~= '' then
    terminate(base, rid, r[4], finish == '1' and 'completed' or 'failed', finish, payload, now)
  end
  return {0, length}
end

local results = {}
for i = 1, #ARGV, 12 do
  results[#results + 1] = commit(unpack(ARGV, i, i + 11))
end
return results
