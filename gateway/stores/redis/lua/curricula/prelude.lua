-- Shared by the operations on curricula, loaded after shared/base.lua.

-- Records -----------------------------------------------------------------------------------------------------------

-- Write a record's number, a double, with enough digits to read back the same value.
local function exact(number)
  return string.format('%.17g', number)
end

-- Each change of an environment's records has a number. A removed record has the number of its removal. The epoch
-- differs after a loss of all data, so that readers do not confuse new numbers with earlier ones.
local function changes_begin(environment, epoch)
  local sums = key('curriculum_changes', environment)
  redis.call('HSETNX', sums, 'epoch', epoch)
  return tonumber(redis.call('HGET', sums, 'number') or '0')
end

local function changes_end(environment, number)
  redis.call('HSET', key('curriculum_changes', environment), 'number', whole(number))
end

-- Remove the records of *tasks* of *environment*, and return the number of the last change. The names of removed
-- records are kept for replicas that know these records. A replica that missed more than *gone_kept* removals reads all
-- again.
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

-- The keys of groups and places contain the era of their curriculum, which ends when the curriculum is reset. Entries
-- of an earlier era are not found again, and expire.
local function era(curriculum)
  return redis.call('HGET', key('curriculum', curriculum), 'era')
end

local function group_of(epoch, handle)
  return key('curriculum_group', epoch .. ':' .. handle)
end

local function member_of(epoch, handle, member)
  return key('curriculum_member', epoch .. ':' .. handle .. ':' .. member)
end

-- Store a place in a group: the number of its draw, the only call that may undo it, and the drawn place. It expires
-- with its group.
local function write_place(member, number, call, place, left_ms)
  redis.call('SET', member, number .. ' ' .. call .. '\n' .. place, 'PX', math.max(1, left_ms))
end

-- Return the number and the place of *member*, or nothing. An earlier call returned them, so no single call may undo
-- them.
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
