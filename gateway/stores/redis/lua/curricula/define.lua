-- Keep a definition.
-- ARGV: curriculum, body, the most definitions, the version that all of them are in then
-- Returns 1, or 0 if there would be too many.

local definitions = key('curriculum_definitions')
if redis.call('HEXISTS', definitions, ARGV[1]) == 0 and redis.call('HLEN', definitions) >= tonumber(ARGV[3]) then
  return 0
end
redis.call('HSET', definitions, ARGV[1], ARGV[2])
redis.call('SET', key('curriculum_version'), ARGV[4])
return 1
