-- add_requests: write requests of a VALIDATING job; nothing sees them before start_job.
-- KEYS meta | ARGV per request: rid, line, choice, custom_id, spec, prompt_tokens, max_tokens
-- Reads meta; writes r:<rid>, pending. Idempotent: repeats overwrite equally. After the start a repeat is refused only
-- if the request is not there, so that a late retry of a lost reply does no harm.
local base = base_of(KEYS[1])
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  return redis.error_reply('NOJOB no such job')
end
for i = 1, #ARGV, 7 do
  local rkey = base .. 'r:' .. ARGV[i]
  if state == 'validating' then
    redis.call('HSET', rkey, 'state', 'ready', 'line', ARGV[i + 1], 'choice', ARGV[i + 2], 'cid', ARGV[i + 3],
      'spec', ARGV[i + 4], 'prompt_tokens', ARGV[i + 5], 'max_tokens', ARGV[i + 6], 'inc', '0', 'epoch', '0')
    redis.call('ZADD', base .. 'pending', ARGV[i + 1], ARGV[i])
  elseif redis.call('HGET', rkey, 'spec') ~= ARGV[i + 4] then
    return redis.error_reply('BADSTATE the job is ' .. state .. ': it takes no more requests')
  end
end
return 'OK'
