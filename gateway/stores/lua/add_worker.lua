-- Register a worker; one that is known stays as it is.
-- ARGV: worker id, environment, digest, slots, max_uses, address, state
-- Returns 1, or 0 if it was known.

local id, environment = ARGV[1], ARGV[2]
if redis.call('EXISTS', key('worker', id)) == 1 then
  return 0
end
local number = redis.call('INCR', key('number'))
local rank = string.format('%0' .. RANK_DIGITS .. '.0f', number) .. id
redis.call('HSET', key('worker', id), 'id', id, 'environment', environment, 'digest', ARGV[3], 'slots', ARGV[4],
  'max_uses', ARGV[5], 'address', ARGV[6], 'state', ARGV[7], 'rank', rank, 'uses', 0, 'added_ms', whole(now),
  'idle_ms', whole(now))
redis.call('ZADD', key('workers'), number, id)
if ARGV[7] == 'ready' then
  list_free(id, environment, rank, 0, tonumber(ARGV[4]))
  serve(environment)
end
return 1
