-- Remove a task. Its name is kept for replicas that know the task.
-- ARGV: environment, id, maximum number of removed tasks whose names are kept
-- Returns 1, or 0 if there is no such task.

local name, sums, changes = ARGV[1] .. ' ' .. ARGV[2], key('task_sums'), key('task_changes')
local had = redis.call('HGET', key('tasks'), name)
if not had then
  return 0
end
local number = changes_begin() + 1
redis.call('HDEL', key('tasks'), name)
redis.call('HINCRBY', sums, 'count:' .. ARGV[1], -1)
redis.call('HINCRBY', sums, 'bytes', string.find(had, '\n', 1, true) - string.len(had))
redis.call('ZADD', changes, whole(number), name)
if redis.call('HINCRBY', sums, 'gone', 1) > tonumber(ARGV[3]) then
  -- Replicas with an older version read all tasks again.
  for _, other in ipairs(redis.call('ZRANGE', changes, 0, -1)) do
    if redis.call('HEXISTS', key('tasks'), other) == 0 then
      redis.call('ZREM', changes, other)
    end
  end
  redis.call('HSET', sums, 'gone', '0', 'floor', whole(number))
end
changes_end(number)
return 1
