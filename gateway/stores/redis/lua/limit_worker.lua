-- Lower a worker's number of slots. Sessions beyond the new number keep their slots, which then end with them.
-- ARGV: worker id, slots (at least 1)
-- Returns 1, or 0 if the worker is unknown or does not have more slots.

local id, slots = ARGV[1], tonumber(ARGV[2])
local worker = redis.call('HMGET', key('worker', id), 'state', 'environment', 'rank', 'slots')
if not worker[1] or slots >= tonumber(worker[4]) then
  return 0
end
redis.call('HSET', key('worker', id), 'slots', whole(slots))
if worker[1] == 'ready' then
  list_free(id, worker[2], worker[3], redis.call('SCARD', key('held', id)), slots)
end
if redis.call('EXISTS', key('queue', worker[2])) == 1 then
  publish_wanted(worker[2])
end
return 1
