-- Store a definition.
-- ARGV: curriculum, body, maximum number of definitions, the new version of all definitions
-- Returns 1, or 0 if there would be too many definitions.

local definitions = key('curriculum_definitions')
if redis.call('HEXISTS', definitions, ARGV[1]) == 0 and redis.call('HLEN', definitions) >= tonumber(ARGV[3]) then
  return 0
end
redis.call('HSET', definitions, ARGV[1], ARGV[2])
redis.call('SET', key('curriculum_version'), ARGV[4])
return 1
