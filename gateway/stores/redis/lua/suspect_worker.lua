-- Mark a ready worker, which does not answer, as suspect: it gets no session until it is woken. Its sessions continue.
-- ARGV: worker id
-- Returns 1 if the worker is suspect now, else 0.

local worker = redis.call('HMGET', key('worker', ARGV[1]), 'state', 'environment', 'rank')
if worker[1] == 'ready' then
  redis.call('HSET', key('worker', ARGV[1]), 'state', 'suspect')
  redis.call('ZREM', key('free', worker[2]), worker[3])
  publish_wanted(worker[2])
  return 1
end
return worker[1] == 'suspect' and 1 or 0
