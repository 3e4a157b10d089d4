-- Prepended to every script. KEYS[1] is the job's meta key; every other key of the job shares its hash tag, hence its slot.

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Lua would print large numbers as 1.7e+15.
local function int(number)
  return string.format('%.0f', number)
end

local function base_of(meta)
  return string.sub(meta, 1, -5)
end

-- Refuses an orchestrator that has been replaced, and remembers the newest term.
local function stale_term(meta, term)
  if redis.call('EXISTS', meta) == 0 then
    return redis.error_reply('NOJOB no such job')
  end
  local held = tonumber(redis.call('HGET', meta, 'term') or '0')
  if tonumber(term) < held then
    return redis.error_reply('STALELEADER term ' .. term .. ' is older than ' .. int(held))
  end
  if tonumber(term) > held then
    redis.call('HSET', meta, 'term', term)
  end
  return nil
end

-- Terminal state, result line and counts together. The caller has checked that the request is not terminal yet.
local function terminate(base, rid, line, state, ok, payload, now)
  redis.call('ZREM', base .. 'ready', rid)
  redis.call('ZREM', base .. 'leased', rid)
  local length = redis.call('RPUSH', base .. 'results', line .. ':' .. ok .. ':' .. payload)
  redis.call('HSET', base .. 'r:' .. rid, 'state', state, 'ridx', int(length - 1), 'finished_at', int(now))
  redis.call('HINCRBY', base .. 'meta', ok == '1' and 'completed' or 'failed', 1)
end

-- The same as watermark.advance: clamp to T-1, never back within an epoch, cut older segments, no holes.
local function advance_watermark(rkey, epoch, known, positions, first_page, layout)
  local held = redis.call('HMGET', rkey, 'wm', 'layout', 'segs', 'wm_epoch')
  local same_layout = held[2] == layout
  local older = {}
  if same_layout then
    for e, f in string.gmatch(held[3] or '', '(%d+):(%d+)') do
      if tonumber(e) == epoch then
        first_page = math.min(first_page, tonumber(f))
      else
        older[#older + 1] = {tonumber(e), tonumber(f)}
      end
    end
  end
  local segments = {}
  local lowest = first_page
  for _, segment in ipairs(older) do
    if segment[2] < first_page then
      lowest = math.min(lowest, segment[2])
      segments[#segments + 1] = int(segment[1]) .. ':' .. int(segment[2])
    end
  end
  segments[#segments + 1] = int(epoch) .. ':' .. int(first_page)
  positions = math.max(0, math.min(positions, known - 1))
  if lowest ~= 0 then
    positions = 0
  end
  if same_layout and tonumber(held[4] or '0') == epoch then
    positions = math.max(positions, tonumber(held[1] or '0'))
  end
  redis.call('HSET', rkey, 'wm', int(positions), 'layout', layout, 'segs', table.concat(segments, ','),
    'wm_epoch', int(epoch))
end

-- Opens a row of the recovery table and counts the interruption; `taker` is the epoch that will take over.
local function record_interruption(base, rid, taker, cause, blamed, target, now)
  local rkey = base .. 'r:' .. rid
  local r = redis.call('HMGET', rkey, 'line', 'cid', 'worker', 'wm', 'prompt_tokens', 'last_at', 'leased_at', 'choice')
  local row = {
    line = tonumber(r[1]), custom_id = r[2], epoch = taker, cause = cause, source = r[3] or '', target = target,
    tokens = redis.call('STRLEN', base .. 't:' .. rid) / 4, watermark = tonumber(r[4] or '0'),
    prompt_tokens = tonumber(r[5]), last_at = tonumber(r[6] or r[7] or int(now)), moved_at = now,
    choice = tonumber(r[8] or '0'),
  }
  if target ~= '' then
    row.leased_at = now
  end
  redis.call('HSET', base .. 'intr', rid .. ':' .. int(taker), cmsgpack.pack(row))
  redis.call('HINCRBY', rkey, blamed == '1' and 'attempts' or 'interruptions', 1)
end

-- Fills in fields of an epoch's row, if it has one. Setting the same again changes nothing.
local function complete_interruption(base, rid, epoch, fields)
  local name = rid .. ':' .. int(epoch)
  local packed = redis.call('HGET', base .. 'intr', name)
  if packed then
    local row = cmsgpack.unpack(packed)
    for field, value in pairs(fields) do
      row[field] = value
    end
    redis.call('HSET', base .. 'intr', name, cmsgpack.pack(row))
  end
end
