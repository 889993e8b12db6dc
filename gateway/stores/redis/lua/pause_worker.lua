-- Pause a ready worker that holds no session. It gets no session until it is woken.
-- ARGV: worker id, the caller's fence
-- Returns 1 if the worker is paused now, else 0.

if fenced() then
  return NOT_LEADING
end
local worker = redis.call('HMGET', key('worker', ARGV[1]), 'state', 'environment', 'rank')
if worker[1] == 'ready' and redis.call('SCARD', key('held', ARGV[1])) == 0 and is_whole() then
  redis.call('HSET', key('worker', ARGV[1]), 'state', 'paused')
  redis.call('ZREM', key('free', worker[2]), worker[3])
  return 1
end
return worker[1] == 'paused' and 1 or 0
