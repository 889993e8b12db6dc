-- What the operations on calls share, after shared/base.lua.
-- A place is '<session>:<lease>'. Its hash 'calls' holds, of each call by its task id, 'head:' ('<state> <digest>
-- <key's hash> <replica>', '-' for what it has not) and 'out:' (the outcome); and by the hash of a key, 'key:' (the
-- task id). Its zset 'call_ends' has the moments from which calls are not known.

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

-- What is known of a call, as the operations return it; a replica lives as long as its sign is there.
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

-- The end of what is known --------------------------------------------------------------------------------------------

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

-- Forget sessions that nobody ended, some at a time so that no script takes long.
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
  -- A backstop, where no replica is left to sweep: a little later, so that sizes are counted back.
  redis.call('PEXPIRE', key('calls', place), whole(ends - now + 60000))
  redis.call('PEXPIRE', key('call_ends', place), whole(ends - now + 60000))
end

-- Drop what is over, then the oldest of what is too much.
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
      -- Its key stays: a refusal is better than a second run.
      drop_outcome(place, task)
      head.state = 'dropped'
      set_head(place, task, head)
    end
  end
end
