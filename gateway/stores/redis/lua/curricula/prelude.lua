-- What the operations on curricula share, after shared/base.lua.

-- Records -----------------------------------------------------------------------------------------------------------

-- Numbers of records are doubles, and come out as they went in.
local function exact(number)
  return string.format('%.17g', number)
end

-- A change of an environment's records has a number; a record that went has that of its removal. The epoch is another
-- one after a loss of all data: its numbers must not be taken for those of before.
local function changes_begin(environment, epoch)
  local sums = key('curriculum_changes', environment)
  redis.call('HSETNX', sums, 'epoch', epoch)
  return tonumber(redis.call('HGET', sums, 'number') or '0')
end

local function changes_end(environment, number)
  redis.call('HSET', key('curriculum_changes', environment), 'number', whole(number))
end

-- Remove *tasks* of *environment*, which have records; returns the number of the last change. That they went is
-- remembered, for replicas that knew them; those who missed more than *gone_kept* removals begin anew.
local function remove_records(environment, tasks, number, gone_kept)
  local gone = key('curriculum_gone', environment)
  for _, task in ipairs(tasks) do
    number = number + 1
    redis.call('HDEL', key('curriculum_records', environment), task)
    redis.call('ZREM', key('curriculum_changed', environment), task)
    redis.call('ZADD', gone, whole(number), task)
  end
  local over = redis.call('ZCARD', gone) - gone_kept
  if over > 0 then
    local last = redis.call('ZRANGE', gone, over - 1, over - 1, 'WITHSCORES')
    redis.call('HSET', key('curriculum_changes', environment), 'floor', whole(last[2]))
    redis.call('ZREMRANGEBYRANK', gone, 0, over - 1)
  end
  return number
end

-- Handles -----------------------------------------------------------------------------------------------------------

-- Groups and places are kept below the era of their curriculum, which ends when it is reset: what was kept in an earlier
-- one is not found again, and goes when its time is over.
local function era(curriculum)
  return redis.call('HGET', key('curriculum', curriculum), 'era')
end

local function group_of(epoch, handle)
  return key('curriculum_group', epoch .. ':' .. handle)
end

local function member_of(epoch, handle, member)
  return key('curriculum_member', epoch .. ':' .. handle .. ':' .. member)
end

-- Write down a place: the number of its draw, the one call that may undo it, and what was drawn. It is forgotten with its
-- group.
local function write_place(member, number, call, place, left_ms)
  redis.call('SET', member, number .. ' ' .. call .. '\n' .. place, 'PX', math.max(1, left_ms))
end

-- The number and the place that *member* has, or nothing. It was told before, so no single call may undo it any more.
local function had(member)
  local kept = redis.call('GET', member)
  if kept then
    local number, place = string.match(kept, '^(%d+) [^\n]*\n(.*)$')
    write_place(member, number, '-', place, redis.call('PTTL', member))
    return number, place
  end
end

local function take(group, member, number, call, place)
  redis.call('HINCRBY', group, 'held', 1)
  write_place(member, number, call, place, redis.call('PTTL', group))
end
