-- Forget a task; that it went is remembered, for replicas that knew it.
-- ARGV: environment, id, how many that went are remembered
-- Returns 1, or 0 if there is none.

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
  -- Replicas that know an older version than this begin anew.
  for _, other in ipairs(redis.call('ZRANGE', changes, 0, -1)) do
    if redis.call('HEXISTS', key('tasks'), other) == 0 then
      redis.call('ZREM', changes, other)
    end
  end
  redis.call('HSET', sums, 'gone', '0', 'floor', whole(number))
end
changes_end(number)
return 1
