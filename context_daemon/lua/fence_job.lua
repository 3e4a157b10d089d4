-- fence_job: raise a job's incarnation, which fences every owner under an older one.
-- KEYS meta | ARGV incarnation
-- Reads and writes meta. Idempotent: it never goes down, and an absent job stays absent.
if redis.call('EXISTS', KEYS[1]) == 1 and tonumber(redis.call('HGET', KEYS[1], 'inc') or '1') < tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'inc', ARGV[1])
end
return 'OK'
