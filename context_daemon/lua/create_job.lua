-- create_job: write a job's meta as VALIDATING unless it exists.
-- KEYS meta | ARGV created_at_us, incarnation, then field, value, ...
-- Reads and writes meta. Idempotent: an existing meta is only read. Answers meta (the caller compares the digest).
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'state', 'validating', 'created_at', ARGV[1], 'inc', ARGV[2], 'term', '0',
    'total', '0', 'completed', '0', 'failed', '0', 'output_tokens', '0', 'error', '')
  for i = 3, #ARGV, 2 do
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return redis.call('HGETALL', KEYS[1])
