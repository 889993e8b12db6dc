-- Release the lead, so that another replica need not wait for its end.
-- ARGV: replica
-- Returns 1, also if another replica leads.

local leader = string.match(redis.call('GET', key('leader')) or '', '^%d+ %x+ (.*)$')
if leader == ARGV[1] then
  redis.call('DEL', key('leader'))
end
return 1
