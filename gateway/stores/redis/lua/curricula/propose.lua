-- Propose a place for the draw that is due for a handle, and join its group. The first proposal wins.
-- ARGV: curriculum, handle, the draw's number, place, member, id of this call
-- Returns {number, place}, or nothing if the draw is over and its group is full or ended.

local handle = ARGV[2]
local epoch = era(ARGV[1])
if not epoch then
  return false
end
local member, group = member_of(epoch, handle, ARGV[5]), group_of(epoch, handle)
local number, place = had(member)
if number then
  return {number, place}
end
local turns = key('curriculum_turns', ARGV[1])
local due, size, group_s = string.match(redis.call('HGET', turns, handle) or '', '^(%d+) (%S+) (%S+)$')
if due == ARGV[3] then
  redis.call('HDEL', turns, handle)
  redis.call('HSET', group, 'number', due, 'size', size, 'held', 0, 'place', ARGV[4])
  redis.call('PEXPIRE', group, whole(math.ceil(tonumber(group_s) * 1000)))
  take(group, member, due, ARGV[6], ARGV[4])
  return {due, ARGV[4]}
end
local found = redis.call('HMGET', group, 'number', 'held', 'size', 'place')
if found[1] == ARGV[3] and tonumber(found[2]) < tonumber(found[3]) then
  take(group, member, found[1], ARGV[6], found[4])
  return {found[1], found[4]}
end
return false
