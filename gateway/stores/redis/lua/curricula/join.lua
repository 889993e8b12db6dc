-- Take a place in the current group of a handle, or return the number of the draw that is due.
-- ARGV: curriculum, handle, member, id of this call, group size, a group's time (s), an era for curricula without one
-- Returns {'drawn', number, place} or {'turn', number}.

local curriculum, handle = key('curriculum', ARGV[1]), ARGV[2]
redis.call('HSETNX', curriculum, 'era', ARGV[7])
local epoch = era(ARGV[1])
local member, group = member_of(epoch, handle, ARGV[3]), group_of(epoch, handle)
local number, place = had(member)
if number then
  return {'drawn', number, place}
end
local found = redis.call('HMGET', group, 'number', 'held', 'place')
if found[1] and tonumber(found[2]) < tonumber(ARGV[5]) then
  take(group, member, found[1], ARGV[4], found[3])
  return {'drawn', found[1], found[3]}
end
-- The last opening that asks before the draw sets the size and time of its group.
local turns = key('curriculum_turns', ARGV[1])
local due = redis.call('HGET', turns, handle)
number = due and string.match(due, '^%d+') or whole(redis.call('HINCRBY', curriculum, 'number', 1) - 1)
redis.call('HSET', turns, handle, number .. ' ' .. ARGV[5] .. ' ' .. ARGV[6])
return {'turn', number}
