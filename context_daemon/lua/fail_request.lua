-- fail_request: READY at that epoch -> FAILED with its error line.
-- KEYS meta | ARGV term, rid, epoch, payload
-- Reads r:<rid>, ready; writes meta (term, counts), r:<rid>, ready, results. Idempotent: FAILED at that epoch is the
-- repeat (an owner's failure lies under a leased epoch, never this one). Answers 1 if failed so.
local base = base_of(KEYS[1])
local stale = stale_term(KEYS[1], ARGV[1])
if stale then
  return stale
end
local rid = ARGV[2]
local r = redis.call('HMGET', base .. 'r:' .. rid, 'state', 'epoch', 'line')
if r[1] == 'failed' and r[2] == ARGV[3] then
  return 1
end
if r[1] == 'ready' and r[2] == ARGV[3] and redis.call('ZSCORE', base .. 'ready', rid) then
  terminate(base, rid, r[3], 'failed', '0', ARGV[4], now_us())
  return 1
end
return 0
