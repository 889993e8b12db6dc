-- List open sessions whose deadline has passed, earliest first; changes none of them.
-- ARGV: how many
-- Returns the sessions.

return read_all(passed(tonumber(ARGV[1]), true))
