-- Lower a worker's slots; sessions that hold one beyond them keep it, and nobody gets it after them.
-- ARGV: worker id, slots (at least 1)
-- Returns 1, or 0 if it is unknown or has no more.

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
