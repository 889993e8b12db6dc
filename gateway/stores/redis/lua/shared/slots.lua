-- Slots -------------------------------------------------------------------------------------------------------------

local function drain(worker, environment, rank)
  redis.call('HSET', key('worker', worker), 'state', 'draining')
  redis.call('ZREM', key('free', environment), rank)
  publish_wanted(environment)
end

-- List the worker among the free workers, with its number of used slots as score. A full worker is not listed.
local function list_free(worker, environment, rank, used, slots)
  if used < slots then
    redis.call('ZADD', key('free', environment), used, rank)
  else
    redis.call('ZREM', key('free', environment), rank)
  end
end

-- Turn *opening* (values in the order of OPENING) into a session of the worker of *rank*, which is ready and has room.
local function grant(opening, rank)
  local worker = string.sub(rank, RANK_DIGITS + 1)
  local id, environment = opening[1], opening[4]
  local has = redis.call('HMGET', key('worker', worker), 'slots', 'max_uses', 'address')
  redis.call('DEL', key('session', id), key('reply', id))
  redis.call('HSET', key('session', id), 'id', id, 'name', opening[2], 'owner', opening[3],
    'environment', environment, 'lease', opening[5], 'fingerprint', opening[6], 'idle_s', opening[7],
    'task', opening[9], 'episode', opening[11], 'policy', opening[12] or '', 'worker', worker, 'address', has[3],
    'state', 'opening', 'replica', opening[10], 'setup_s', opening[8])
  redis.call('HSET', key('openings', opening[10]), id, opening[5])
  redis.call('ZADD', key('deadlines'), after(opening[8]), id)
  redis.call('SADD', key('held', worker), id)
  own(environment, opening[3], id)
  if not is_whole() then
    -- A transfer (hand_over.lua) during a rebuild: adopt.lua must not treat the session as one of an older state.
    redis.call('HSET', key('session', id), 'run', run())
  end
  local uses = redis.call('HINCRBY', key('worker', worker), 'uses', opening[IS_USE] == '0' and 0 or 1)
  local max_uses = tonumber(has[2])
  if max_uses > 0 and uses >= max_uses then
    drain(worker, environment, rank)
  else
    list_free(worker, environment, rank, redis.call('SCARD', key('held', worker)), tonumber(has[1]))
  end
end
