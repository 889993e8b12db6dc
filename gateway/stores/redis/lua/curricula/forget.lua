-- Remove records of an environment.
-- ARGV: environment, task ('' for all tasks), maximum number of removed records whose names are kept
-- Returns the number of removed records.

local environment, task = ARGV[1], ARGV[2]
local records = key('curriculum_records', environment)
if task == '' then
  local count = redis.call('HLEN', records)
  -- Without an epoch, every reader reads everything again, and finds nothing.
  redis.call('UNLINK', records, key('curriculum_changed', environment), key('curriculum_gone', environment),
    key('curriculum_changes', environment))
  return count
end
if redis.call('HEXISTS', records, task) == 0 then
  return 0
end
local number = tonumber(redis.call('HGET', key('curriculum_changes', environment), 'number') or '0')
changes_end(environment, remove_records(environment, {task}, number, tonumber(ARGV[3])))
return 1
