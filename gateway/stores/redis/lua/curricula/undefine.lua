-- Remove a definition, with its draws and state.
-- ARGV: curriculum, the new version of the other definitions
-- Returns 1, or 0 if there is no such definition.

if redis.call('HDEL', key('curriculum_definitions'), ARGV[1]) == 0 then
  return 0
end
redis.call('SET', key('curriculum_version'), ARGV[2])
redis.call('UNLINK', key('curriculum', ARGV[1]), key('curriculum_turns', ARGV[1]))
return 1
