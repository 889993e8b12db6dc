-- Shared by the operations on calls, loaded after shared/base.lua. A place is '<session>:<lease>'. Its hash 'calls'
-- holds, for each task id, 'head:' ('<state> <digest> <key's hash> <replica>', with '-' for a missing value) and 'out:'
-- (the outcome); and for each key's hash, 'key:' (the task id). Its sorted set 'call_ends' has the time at which each
-- call becomes unknown.

local SWEPT, TIDIED = 20, 512

local function head_of(place, task)
  local head = redis.call('HGET', key('calls', place), 'head:' .. task)
  if not head then
    return nil
  end
  local state, digest, hashed, replica = string.match(head, '^(%S+) (%S+) (%S+) (.*)$')
  return {state = state, digest = digest, hashed = hashed, replica = replica}
end

local function set_head(place, task, head)
  redis.call('HSET', key('calls', place), 'head:' .. task,
    head.state .. ' ' .. head.digest .. ' ' .. head.hashed .. ' ' .. head.replica)
  if head.hashed ~= '-' then
    redis.call('HSET', key('calls', place), 'key:' .. head.hashed, task)
  end
end

-- Return a call in the form of the operations' answers. A replica lives as long as its sign exists.
local function told(place, task, head)
  local lives, outcome = 1, ''
  if head.state == 'running' then
    lives = redis.call('EXISTS', key('call_replica', head.replica))
  elseif head.state == 'done' then
    outcome = redis.call('HGET', key('calls', place), 'out:' .. task) or ''
  end
  return {task, head.state, head.replica, lives, outcome}
end

local function sign(replica, life_s)
  redis.call('SET', key('call_replica', replica), '1', 'PX', whole(math.ceil(tonumber(life_s) * 1000)))
end

-- Sizes -------------------------------------------------------------------------------------------------------------

local function count(place, by)
  redis.call('HINCRBY', key('call_sizes'), place, whole(by))
  if redis.call('INCRBY', key('call_bytes'), whole(by)) <= 0 then
    redis.call('DEL', key('call_bytes'))
  end
end

local function size_of(place)
  return tonumber(redis.call('HGET', key('call_sizes'), place) or '0')
end

local function drop_outcome(place, task)
  local size = redis.call('HSTRLEN', key('calls', place), 'out:' .. task)
  if redis.call('HDEL', key('calls', place), 'out:' .. task) == 1 then
    count(place, -size)
  end
end

-- Removal -------------------------------------------------------------------------------------------------------------

local function remove(place, task, head)
  drop_outcome(place, task)
  if head and head.hashed ~= '-' and redis.call('HGET', key('calls', place), 'key:' .. head.hashed) == task then
    redis.call('HDEL', key('calls', place), 'key:' .. head.hashed)
  end
  redis.call('HDEL', key('calls', place), 'head:' .. task)
  redis.call('ZREM', key('call_ends', place), task)
end

local function forget_all(place)
  local size = size_of(place)
  if size ~= 0 then
    count(place, -size)
  end
  redis.call('HDEL', key('call_sizes'), place)
  redis.call('DEL', key('calls', place), key('call_ends', place))
  redis.call('ZREM', key('call_places'), place)
end

-- Remove the calls of sessions that were never ended, a few sessions per script so that no script takes long.
local function sweep()
  local late = redis.call('ZRANGEBYSCORE', key('call_places'), '-inf', whole(now), 'LIMIT', 0, SWEPT)
  for _, place in ipairs(late) do
    forget_all(place)
  end
end

local function keep(place, task, seconds)
  local ends = now + math.ceil(tonumber(seconds) * 1000)
  redis.call('ZADD', key('call_ends', place), whole(ends), task)
  local known = redis.call('ZSCORE', key('call_places'), place)
  if known and tonumber(known) > ends then
    ends = tonumber(known)
  end
  redis.call('ZADD', key('call_places'), whole(ends), place)
  -- A fallback if no replica is left to sweep. It expires 60 s later, so that a sweep can correct the sizes first.
  redis.call('PEXPIRE', key('calls', place), whole(ends - now + 60000))
  redis.call('PEXPIRE', key('call_ends', place), whole(ends - now + 60000))
end

-- Remove expired calls, then the oldest calls or outcomes beyond the limits.
local function tidy(place, most, most_bytes)
  for _, task in ipairs(redis.call('ZRANGEBYSCORE', key('call_ends', place), '-inf', whole(now), 'LIMIT', 0, TIDIED)) do
    remove(place, task, head_of(place, task))
  end
  local over = redis.call('ZCARD', key('call_ends', place)) - most
  if over <= 0 and size_of(place) <= most_bytes then
    return
  end
  for _, task in ipairs(redis.call('ZRANGE', key('call_ends', place), 0, -1)) do
    local head = head_of(place, task)
    if over <= 0 and size_of(place) <= most_bytes then
      return
    elseif not head or (over > 0 and head.state ~= 'running') then
      remove(place, task, head)
      over = over - 1
    elseif head.state == 'done' and head.hashed == '-' then
      remove(place, task, head)
    elseif head.state == 'done' then
      -- The key stays, because a refusal is better than a second run of the call.
      drop_outcome(place, task)
      head.state = 'dropped'
      set_head(place, task, head)
    end
  end
end
