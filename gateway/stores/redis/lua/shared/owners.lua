-- Owners ------------------------------------------------------------------------------------------------------------

-- Every session that holds a slot counts for its owner. The hash owners names the owner and environment of each counted
-- session, so that a session counts only once, and its end does not depend on its key.

-- Stop counting session *id*. Return its owner; nil if it does not count.
local function disown(id)
  local counted = redis.call('HGET', key('owners'), id)
  if not counted then
    return nil
  end
  redis.call('HDEL', key('owners'), id)
  local environment, owner = string.match(counted, '^([^:]*):(.*)$')
  if redis.call('HINCRBY', key('owned', owner), 'all', -1) <= 0 then
    redis.call('DEL', key('owned', owner))
  elseif redis.call('HINCRBY', key('owned', owner), 'in:' .. environment, -1) <= 0 then
    redis.call('HDEL', key('owned', owner), 'in:' .. environment)
  end
  return owner
end

-- Count session *id*, in place of an earlier session of this id.
local function own(id, environment, owner)
  disown(id)
  redis.call('HSET', key('owners'), id, environment .. ':' .. owner)
  redis.call('HINCRBY', key('owned', owner), 'all', 1)
  redis.call('HINCRBY', key('owned', owner), 'in:' .. environment, 1)
end

-- Stop counting sessions that ended without a call of disown: another client of Redis deleted their keys, or a replica
-- of an earlier version released them. Each session that holds a slot has a deadline.
local function disown_ended()
  if redis.call('HLEN', key('owners')) > redis.call('ZCARD', key('deadlines')) then
    for _, id in ipairs(redis.call('HKEYS', key('owners'))) do
      if not redis.call('ZSCORE', key('deadlines'), id) then
        disown(id)
      end
    end
  end
end

-- Return the number of sessions that *owner* holds: in all, and in *environment*.
local function count_owned(environment, owner)
  local counts = redis.call('HMGET', key('owned', owner), 'all', 'in:' .. environment)
  return tonumber(counts[1] or '0'), tonumber(counts[2] or '0')
end

-- Return the number of further sessions that the limits of *opening* allow its owner. As in limits.py.
local function room_of(opening)
  -- A ticket of an earlier version has no limits.
  local most, most_here = tonumber(opening[MAX_SESSIONS] or '0'), tonumber(opening[MAX_HERE] or '0')
  if most == 0 and most_here == 0 then
    return math.huge
  end
  local held, held_here = count_owned(opening[4], opening[3])
  local left = most > 0 and most - held or math.huge
  local left_here = most_here > 0 and most_here - held_here or math.huge
  return math.max(0, math.min(left, left_here))
end
