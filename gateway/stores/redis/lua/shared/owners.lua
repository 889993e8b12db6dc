-- Owners ------------------------------------------------------------------------------------------------------------

-- Every session that holds a slot counts for its owner: a sorted set of each owner has the sessions' environments and
-- ids, all with the score 0. So a session counts only once, and those of one environment are a range.

local function own(environment, owner, id)
  redis.call('ZADD', key('owned', owner), 0, environment .. ':' .. id)
end

local function disown(environment, owner, id)
  redis.call('ZREM', key('owned', owner), environment .. ':' .. id)
end

-- Return the number of sessions that *owner* holds: in all, and in *environment*.
local function count_owned(environment, owner)
  local owned = key('owned', owner)
  -- The semicolon is the character after the colon. Environment names contain neither.
  return redis.call('ZCARD', owned), redis.call('ZLEXCOUNT', owned, '[' .. environment .. ':', '(' .. environment .. ';')
end

-- Number of sessions of an owner at its limit that disown_ended checks.
local LOOKED_AT_OWNED = 100

-- Stop counting sessions of *owner* that ended without a call of disown: another client of Redis deleted their keys, or
-- a replica of an earlier version released them. Each session that holds a slot has a deadline. This checks some
-- sessions, in random order, because an owner may have thousands.
local function disown_ended(owner)
  for _, member in ipairs(redis.call('ZRANDMEMBER', key('owned', owner), LOOKED_AT_OWNED)) do
    if not redis.call('ZSCORE', key('deadlines'), string.match(member, '^[^:]*:(.*)$')) then
      redis.call('ZREM', key('owned', owner), member)
    end
  end
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
