-- List a part of the sessions that hold a slot.
-- ARGV: cursor of ZSCAN ('0' for the first part), about how many sessions
-- Returns the next cursor ('0' at the end), then the sessions. A session may be in two parts.

local scanned = redis.call('ZSCAN', key('deadlines'), ARGV[1], 'COUNT', ARGV[2])
local ids = {}
for i = 1, #scanned[2], 2 do
  ids[#ids + 1] = scanned[2][i]
end
return {scanned[1], read_all(ids)}
