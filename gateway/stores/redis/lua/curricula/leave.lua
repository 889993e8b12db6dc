-- Release a place in a group.
-- ARGV: curriculum, handle, member, id of the call that took the place ('' for any call)
-- Returns 1, or 0 if there is no such place.

local epoch = era(ARGV[1])
local member = epoch and member_of(epoch, ARGV[2], ARGV[3])
local kept = member and redis.call('GET', member)
if not kept then
  return 0
end
local number, call = string.match(kept, '^(%d+) ([^\n]*)\n')
if ARGV[4] ~= '' and ARGV[4] ~= call then
  return 0
end
redis.call('DEL', member)
local group = group_of(epoch, ARGV[2])
if redis.call('HGET', group, 'number') == number then
  redis.call('HINCRBY', group, 'held', -1)
end
return 1
