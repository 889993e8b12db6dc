-- Count what every environment holds and what waits; what groups that wait, or that slots are reserved for, have had
-- their time is noticed here.
-- Returns {the fields WORKER, slots held, idle (ms), age (ms) of one worker with zeros between them, ...}, oldest worker
-- first; {environment, waiting, ...};
-- {'arrivals:' or 'hits:' and environment, count, ...}; {environment, how much longer its breaker is open (ms), ...};
-- {environment, openings of groups that are to come, ...}, to be added up; times as strings.

-- Openings of groups that have not come yet: slots are reserved for them, or will be once there are enough.
local to_come = {}
for _, environment in ipairs(redis.call('SMEMBERS', key('reserving'))) do
  let_go(environment)
  serve(environment)
  to_come[#to_come + 1] = environment
  to_come[#to_come + 1] = reserved_for(environment, 'total')
end
local waiting = {}
for _, environment in ipairs(redis.call('SMEMBERS', key('queues'))) do
  sweep(environment)
  serve(environment) -- a group may have waited for long enough
  local count = redis.call('ZCARD', key('waits', environment))
  if count > 0 then
    waiting[#waiting + 1] = environment
    waiting[#waiting + 1] = count
    to_come[#to_come + 1] = environment
    to_come[#to_come + 1] = count_to_come(environment)
  end
end
-- One string each: lists of names and values take both sides three times as long, and there may be thousands.
local workers = {}
local worker_key, held_key, asked = key('worker', ''), key('held', ''), {unpack(WORKER)}
asked[#WORKER + 1], asked[#WORKER + 2] = 'idle_ms', 'added_ms'
for _, id in ipairs(redis.call('ZRANGE', key('workers'), 0, -1)) do
  local has = redis.call('HMGET', worker_key .. id, unpack(asked))
  local used = redis.call('SCARD', held_key .. id)
  local idle_ms = used > 0 and 0 or now - has[#WORKER + 1]
  local counts = string.format('\0%d\0%.0f\0%.0f', used, idle_ms, now - has[#WORKER + 2])
  workers[#workers + 1] = table.concat(has, '\0', 1, #WORKER) .. counts
end
local breakers = {}
for _, environment in ipairs(redis.call('HKEYS', key('breakers'))) do
  local left_ms = broken(environment)
  if left_ms then
    breakers[#breakers + 1] = environment
    breakers[#breakers + 1] = whole(left_ms)
  end
end
return {workers, waiting, redis.call('HGETALL', key('counts')), breakers, to_come}
