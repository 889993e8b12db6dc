-- Count what every environment holds and what waits.
-- Returns {{worker, slots held, idle (ms), age (ms)}, ...}, oldest worker first; {environment, waiting, ...};
-- {'arrivals:' or 'hits:' and environment, count, ...}; {environment, how much longer its breaker is open (ms), ...};
-- times as strings.

local workers = {}
for _, id in ipairs(redis.call('ZRANGE', key('workers'), 0, -1)) do
  local moments = redis.call('HMGET', key('worker', id), 'idle_ms', 'added_ms')
  local used = redis.call('SCARD', key('held', id))
  local idle_ms = used > 0 and 0 or now - tonumber(moments[1])
  workers[#workers + 1] = {
    redis.call('HGETALL', key('worker', id)), used, whole(idle_ms), whole(now - tonumber(moments[2]))
  }
end
local waiting = {}
for _, environment in ipairs(redis.call('SMEMBERS', key('queues'))) do
  sweep(environment)
  local count = redis.call('ZCARD', key('waits', environment))
  if count > 0 then
    waiting[#waiting + 1] = environment
    waiting[#waiting + 1] = count
  end
end
local breakers = {}
for _, environment in ipairs(redis.call('HKEYS', key('breakers'))) do
  local left_ms = broken(environment)
  if left_ms then
    breakers[#breakers + 1] = environment
    breakers[#breakers + 1] = whole(left_ms)
  end
end
return {workers, waiting, redis.call('HGETALL', key('counts')), breakers}
