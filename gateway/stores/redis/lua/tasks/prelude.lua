-- Shared by the operations on tasks, loaded after shared/base.lua.
-- Each change has a number; task_version is "<epoch>:<number>" of the last change. An epoch starts when there is no
-- version, so that replicas do not confuse numbers after a loss of all data with earlier ones.

local function changes_begin()
  local version = redis.call('GET', key('task_version'))
  if not version then
    redis.call('HSET', key('task_sums'), 'epoch', time[1] .. '-' .. time[2])
    return 0
  end
  return tonumber(string.match(version, ':(%d+)$'))
end

local function changes_end(number)
  redis.call('SET', key('task_version'), redis.call('HGET', key('task_sums'), 'epoch') .. ':' .. whole(number))
end
