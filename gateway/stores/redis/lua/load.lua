-- Return the workers, waiting openings and counters of every environment. This call also ends the reservations and the
-- waits of groups whose time is over.
-- Returns {the fields WORKER, used slots, idle time (ms) and age (ms) of one worker, separated by NUL, ...}, oldest
-- worker first; {environment, number of waiting openings, ...}; {'arrivals:' or 'hits:' and environment, count, ...};
-- {environment, time for which its breaker stays open (ms), its message, ...}; {environment, group members that have not
-- arrived, ...}, to be added up; {environment, openings beyond the limits of their owners, ...}. Times are strings.

for _, environment in ipairs(redis.call('SMEMBERS', key('reserving'))) do
  let_go(environment)
end
for _, environment in ipairs(list_queues()) do
  sweep(environment)
  for owner, room in pairs(list_limited(environment)) do
    if room == 0 then
      disown_ended(owner)
    end
  end
end
-- A group may have waited for long enough. A grant may bring an owner to its limit, so that it no longer blocks the queue
-- of another environment.
local served
repeat
  served = 0
  for _, environment in ipairs(list_queues()) do
    served = served + serve(environment)
  end
until served == 0

-- Group members that have not arrived yet: slots are reserved for them, or will be once enough slots are free.
local to_come = {}
for _, environment in ipairs(redis.call('SMEMBERS', key('reserving'))) do
  to_come[#to_come + 1] = environment
  to_come[#to_come + 1] = reserved_for(environment, 'total')
end
local waiting, over_limit = {}, {}
for _, environment in ipairs(list_queues()) do
  local count = redis.call('ZCARD', key('waits', environment))
  if count > 0 then
    waiting[#waiting + 1] = environment
    waiting[#waiting + 1] = count
    local missing, missing_by_owner = count_to_come(environment)
    to_come[#to_come + 1] = environment
    to_come[#to_come + 1] = missing
    over_limit[#over_limit + 1] = environment
    over_limit[#over_limit + 1] = count_over_limit(environment, missing_by_owner)
  end
end
-- One string per worker: lists of names and values take both sides three times as long, for possibly thousands of
-- workers.
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
  local left_ms, message = broken(environment)
  if left_ms then
    breakers[#breakers + 1] = environment
    breakers[#breakers + 1] = whole(left_ms)
    breakers[#breakers + 1] = message
  end
end
return {workers, waiting, redis.call('HGETALL', key('counts')), breakers, to_come, over_limit}
