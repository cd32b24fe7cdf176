-- Who owns which page, one partition a call. Loaded together with functions.lua.
--
-- Keys of a partition, all with the hash tag {mesh:partition}:
--   1 dg  hash    slot -> epoch u64, tag u16, seq u64, count u32, xor u64
--   2 ev  stream  field b of an entry: op u8, slot u16, epoch u64, seq u64, marks; capped
--   3 bm  bitmap  of the buckets in use
--   4...  b:<n>   hash    mark (7 bytes of a page's hash) -> owner records: slot u16, tag u16
--
-- A record is live while its tag is that of the slot's row. A fence gives the slot a new tag, so
-- the slot's records die at once, however many there are; sweep removes what is dead. count and xor
-- are those of the live records. State and event change in one call, so the order of the stream is
-- the order of the state, and whoever replays it ends with the same records.
--
-- In a slot that is moving away a call begins only if all its keys are still there, and ends in the
-- middle, with half of its changes made, where it touches one that it has emptied. So none does.

-- As locals these are found faster, and publish does little else than call them. They do not exist
-- yet when the library is loaded.
local sub, concat, pack, read, bxor

local function bound(callback)
  return function(keys, args)
    sub, concat, pack = string.sub, table.concat, struct.pack
    read, bxor = struct.unpack, bit.bxor
    return callback(keys, args)
  end
end

local ROW = '>I8I2I8I4I4I4'
local MAX_PAGE_EVENTS = 4000
local DEAD = 0 -- no tag of a row

local function split_marks(text, first)
  local marks = {}
  for at = first, #text, 7 do
    marks[#marks + 1] = sub(text, at, at + 6)
  end
  return marks
end

-- Where a value has a record, live or not, of the owner's slot.
local function owner_at(value, owner)
  local slot = sub(owner, 1, 2)
  for at = 1, #value, 4 do
    if sub(value, at, at + 1) == slot then return at end
  end
end

local function tell(key, op, slot, epoch, seq, marks)
  redis.call('XADD', key, 'MAXLEN', '~', MAX_PAGE_EVENTS, '*', 'b',
    pack('>BI2I8I8', op, slot, epoch, seq) .. marks)
end

-- Value of a page with the owner's record in it, and whether the owner is new.
local function owned(value, owner)
  if not value then return owner, true end
  local at = owner_at(value, owner)
  if not at then return value .. owner, true end
  if sub(value, at, at + 3) == owner then return value, false end
  return sub(value, 1, at - 1) .. owner .. sub(value, at + 4), true
end

-- Value of a page without the slot's record, and whether it was the owner's.
local function disowned(value, owner)
  local at = value and owner_at(value, owner)
  if not at then return value, false end
  return sub(value, 1, at - 1) .. sub(value, at + 4), sub(value, at, at + 3) == owner
end

local function write(key, bitmap, bucket, sets, drops, all_new)
  if #sets > 0 then redis.call('HSET', key, unpack(sets)) end
  if #drops > 0 then
    local last = #sets == 0 and redis.call('HLEN', key) == #drops
    redis.call('HDEL', key, unpack(drops))
    if last then redis.call('SETBIT', bitmap, bucket, 0) end
  elseif all_new and #sets > 0 then
    redis.call('SETBIT', bitmap, bucket, 1)
  end
end

-- ARGV: slot, epoch, seq, then for each bucket its number u32 and distinct marks (at most 1000).
-- Answers OK; DUP last (it was applied before); GAP last; FENCED or FUTURE epoch; UNREGISTERED.
local function change_owner(op, changed)
  return function(keys, args)
    local row = redis.call('HGET', keys[1], args[1])
    if not row then return { 'UNREGISTERED' } end
    local slot, epoch, seq = tonumber(args[1]), tonumber(args[2]), tonumber(args[3])
    local current, tag, last, count, high, low = read(ROW, row)
    if epoch < current then return { 'FENCED', text(current) } end
    if epoch > current then return { 'FUTURE', text(current) } end
    if seq <= last then return { 'DUP', text(last) } end
    if seq > last + 1 then return { 'GAP', text(last) } end
    local step = op == 1 and 1 or -1
    local owner = pack('>I2I2', slot, tag)
    local told = {}
    for i = 4, #keys do
      local marks = split_marks(args[i], 5)
      local before = redis.call('HMGET', keys[i], unpack(marks))
      local sets, drops, all_new = {}, {}, true
      for at, mark in ipairs(marks) do
        local value, differs = changed(before[at], owner)
        all_new = all_new and not before[at]
        if value ~= before[at] then
          if value == '' then
            drops[#drops + 1] = mark
          else
            sets[#sets + 1] = mark
            sets[#sets + 1] = value
          end
        end
        if differs then
          local a, b = read('>I3I4', mark)
          high, low, count = bxor(high, a), bxor(low, b), count + step
        end
      end
      write(keys[i], keys[3], read('>I4', args[i]), sets, drops, all_new)
      told[#told + 1] = sub(args[i], 5)
    end
    redis.call('HSET', keys[1], args[1],
      pack(ROW, epoch, tag, seq, count, high % 4294967296, low % 4294967296))
    tell(keys[2], op, slot, epoch, seq, concat(told))
    return { 'OK' }
  end
end

-- ARGV: slot, epoch. Ends all records of the slot. Answers OK; SAME if it has the epoch already;
-- FENCED epoch if it has a later one.
local function fence(keys, args)
  local row = redis.call('HGET', keys[1], args[1])
  local epoch, tag = tonumber(args[2]), 0
  if row then
    local current, before = read(ROW, row)
    if epoch == current then return { 'SAME' } end
    if epoch < current then return { 'FENCED', text(current) } end
    tag = before
  end
  tag = tag % 65535 + 1
  redis.call('HSET', keys[1], args[1], pack(ROW, epoch, tag, 0, 0, 0, 0))
  tell(keys[2], 0, tonumber(args[1]), epoch, 0, '')
  return { 'OK' }
end

-- The tag of a slot's live records; looked up once in a call.
local function tags_of(rows)
  local known = {}
  return function(slot)
    if not known[slot] then
      local row = redis.call('HGET', rows, text(slot))
      local epoch, tag = 0, DEAD
      if row then epoch, tag = read(ROW, row) end
      known[slot] = { tag, epoch }
    end
    return known[slot][1], known[slot][2]
  end
end

-- ARGV: as one bucket of publish, the leading pages of one segment. Answers the live owners of the
-- first of them, packed: slot u16, epoch u64, how many of the leading pages they own u8.
local function lookup(keys, args)
  local values = redis.call('HMGET', keys[4], unpack(split_marks(args[1], 5)))
  local depth_of, order = {}, {}
  for depth, value in ipairs(values) do
    local deeper = false
    for at = 1, #(value or ''), 4 do
      local owner = sub(value, at, at + 3)
      if (depth_of[owner] or 0) == depth - 1 then
        if depth == 1 then order[#order + 1] = owner end
        depth_of[owner], deeper = depth, true
      end
    end
    if not deeper then break end
  end
  local tag_of, hits = tags_of(keys[1]), {}
  for _, owner in ipairs(order) do
    local slot, tag = read('>I2I2', owner)
    local live, epoch = tag_of(slot)
    if tag == live then
      hits[#hits + 1] = pack('>I2I8B', slot, epoch, depth_of[owner])
    end
  end
  return concat(hits)
end

-- ARGV: as publish, from the first bucket on. Answers how many live owners each page has, in a byte.
local function copies(keys, args)
  local tag_of, answer = tags_of(keys[1]), {}
  for i = 4, #keys do
    for _, value in ipairs(redis.call('HMGET', keys[i], unpack(split_marks(args[i - 3], 5)))) do
      local count = 0
      for at = 1, #(value or ''), 4 do
        local slot, tag = read('>I2I2', value, at)
        if tag == tag_of(slot) then count = count + 1 end
      end
      answer[#answer + 1] = string.char(math.min(count, 255))
    end
  end
  return concat(answer)
end

-- Answers the id of the last event, all rows, and the bitmap: where a reader of the events begins.
local function position(keys)
  local last = redis.call('XREVRANGE', keys[2], '+', '-', 'COUNT', 1)
  return { last[1] and last[1][1] or '0-0', redis.call('HGETALL', keys[1]),
    redis.call('GET', keys[3]) or '' }
end

-- Answers slot, marks, slot, marks...: the live records of the buckets given.
local function dump(keys)
  local tag_of, found, order = tags_of(keys[1]), {}, {}
  for i = 4, #keys do
    local flat = redis.call('HGETALL', keys[i])
    for at = 1, #flat, 2 do
      for owner = 1, #flat[at + 1], 4 do
        local slot, tag = read('>I2I2', flat[at + 1], owner)
        if tag == tag_of(slot) then
          if not found[slot] then
            found[slot] = {}
            order[#order + 1] = slot
          end
          table.insert(found[slot], flat[at])
        end
      end
    end
  end
  local answer = {}
  for _, slot in ipairs(order) do
    answer[#answer + 1] = slot
    answer[#answer + 1] = concat(found[slot])
  end
  return answer
end

-- ARGV: numbers of the buckets given. Removes the dead records; answers how many.
local function sweep(keys, args)
  local tag_of, removed = tags_of(keys[1]), 0
  for i = 4, #keys do
    local flat, sets, drops = redis.call('HGETALL', keys[i]), {}, {}
    for at = 1, #flat, 2 do
      local kept, value = {}, flat[at + 1]
      for owner = 1, #value, 4 do
        local slot, tag = read('>I2I2', value, owner)
        if tag == tag_of(slot) then kept[#kept + 1] = sub(value, owner, owner + 3) end
      end
      removed = removed + #value / 4 - #kept
      if #kept == 0 then
        drops[#drops + 1] = flat[at]
      elseif #kept * 4 < #value then
        sets[#sets + 1] = flat[at]
        sets[#sets + 1] = concat(kept)
      end
    end
    for first = 1, #sets, 1000 do
      redis.call('HSET', keys[i], unpack(sets, first, math.min(first + 999, #sets)))
    end
    for first = 1, #drops, 1000 do
      redis.call('HDEL', keys[i], unpack(drops, first, math.min(first + 999, #drops)))
    end
    if #drops * 2 == #flat then redis.call('SETBIT', keys[3], args[i - 3], 0) end
  end
  return removed
end

-- ARGV: slot. The row of one slot, empty if it has none.
local function digest(keys, args)
  return redis.call('HGET', keys[1], args[1]) or ''
end

export('publish', bound(change_owner(1, owned)), {})
export('evict', bound(change_owner(2, disowned)), { 'allow-oom' })
export('fence', bound(fence), { 'allow-oom' })
export('sweep', bound(sweep), { 'allow-oom' })
export('lookup', bound(lookup), { 'no-writes' })
export('copies', bound(copies), { 'no-writes' })
export('position', bound(position), { 'no-writes' })
export('dump', bound(dump), { 'no-writes' })
export('digest', bound(digest), { 'no-writes' })
