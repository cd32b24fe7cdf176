#!lua name=pdmesh_@VERSION@
-- Membership of one mesh, as atomic functions (Redis 7 and later, Valkey).
--
-- Keys, all with the hash tag {mesh:ctl}, so that they lie in one slot:
--   1 meta    hash    inc (random, new after a loss of data), seq (last event), epoch (last given),
--                     layout, next (first slot never given), beat (last call seen, ms)
--   2 leases  zset    worker -> end of its lease, ms of Redis' clock; later by what the store stood
--                     still (see wake)
--   3 roster  hash    worker -> "epoch:state:slot"
--   4 events  stream  entry <seq>-0 for every change; capped
--   5 dead    hash    slot -> last epoch of a worker that left; fenced by a router, then removed
--   6 free    zset    slot -> when it was left
--   7 worker  hash    epoch, instance, state, slot, record; expires some time after the lease, which
--                     decides
--
-- Every change checks the worker's epoch: a stale one changes nothing and is answered FENCED.
-- A key that a call has emptied is not touched again by it, but after reap: in a slot that is moving
-- away this ends the call in the middle. What reap did is whole by then.

local VERSION = '@VERSION@'
local MAX_EVENTS = 20000
local MAX_SLOTS = 65536
local BEAT_MS = 100
local STILL_MS = 500

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

local function text(number)
  return string.format('%.0f', number)
end

-- Names the data set; a data set without a name is new, and its events would be another's.
local function begin(keys, candidate, layout)
  if redis.call('HSETNX', keys[1], 'inc', candidate) == 1 then
    redis.call('HSET', keys[1], 'layout', layout)
    redis.call('HDEL', keys[1], 'seq')
    redis.call('DEL', keys[4])
  end
end

local function emit(keys, ...)
  local seq = text(redis.call('HINCRBY', keys[1], 'seq', 1))
  redis.call('XADD', keys[4], 'MAXLEN', '~', MAX_EVENTS, seq .. '-0', ...)
end

-- Between two calls at most STILL_MS of a lease pass: while the store stands still, or nobody reaches
-- it, no worker can renew, and none is dead for that.
local function wake(keys)
  local now = now_ms()
  local last = tonumber(redis.call('HGET', keys[1], 'beat') or '0')
  local still = now - last - STILL_MS
  if last > 0 and still > 0 then
    local leases = redis.call('ZRANGE', keys[2], 0, -1, 'WITHSCORES')
    for i = 1, #leases, 2 do
      if tonumber(leases[i + 1]) > last then
        redis.call('ZINCRBY', keys[2], text(still), leases[i])
      end
    end
  end
  if now < last or now >= last + BEAT_MS then
    redis.call('HSET', keys[1], 'beat', text(now))
  end
end

local function touch(keys, id, epoch, state, slot, ttl)
  redis.call('PEXPIRE', keys[7], text(4 * ttl))
  redis.call('ZADD', keys[2], text(now_ms() + ttl), id)
  redis.call('HSET', keys[3], id, epoch .. ':' .. state .. ':' .. slot)
end

-- nil if the epoch is the worker's and its lease has not been ended, else the answer to give.
local function fenced(keys, id, epoch)
  local current = redis.call('HGET', keys[7], 'epoch')
  local known = redis.call('HEXISTS', keys[1], 'inc') == 1
  if current == epoch and known and redis.call('HEXISTS', keys[3], id) == 1 then
    wake(keys)
    return nil
  end
  return { 'FENCED', current or '0' }
end

-- The slot of an entry of the roster.
local function slot_of(entry)
  return entry and string.match(entry, ':(%d+)$')
end

-- The slot that the worker holds, else the one left longest ago, else one never given.
local function take_slot(keys, id)
  local held = slot_of(redis.call('HGET', keys[3], id))
  if held then return held end
  local left = redis.call('ZPOPMIN', keys[6])
  if left[1] then return left[1] end
  local next_slot = tonumber(redis.call('HGET', keys[1], 'next') or '0')
  if next_slot >= MAX_SLOTS then return nil end
  redis.call('HSET', keys[1], 'next', next_slot + 1)
  return text(next_slot)
end

-- Whoever left the slot is fenced by its next holder, or by a router before that.
local function give_slot(keys, slot, epoch)
  redis.call('ZADD', keys[6], text(now_ms()), slot)
  redis.call('HSET', keys[5], slot, epoch)
end

local function leave(keys, id, epoch, slot)
  redis.call('ZREM', keys[2], id)
  redis.call('HDEL', keys[3], id)
  give_slot(keys, slot, epoch)
  emit(keys, 'op', 'leave', 'worker', id, 'epoch', epoch)
end

-- Ends the leases that are over.
local function reap(keys)
  wake(keys)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', keys[2], '-inf', text(now_ms()))) do
    local entry = redis.call('HGET', keys[3], id)
    if entry then
      leave(keys, id, string.match(entry, '^%d+'), slot_of(entry))
    else
      redis.call('ZREM', keys[2], id)
    end
  end
end

-- ARGV: id, instance, record, ttl_ms, state, takeover (1 or 0), candidate for inc, layout,
-- floor. Answers OK epoch slot layout; TAKEN instance if a live process of another instance
-- holds the name; FULL if there are too many workers.
-- Epochs rise for ever: above the floor, by one, and to the clock, so also across a loss of data.
local function register(keys, args)
  local id, instance, record, ttl, state = args[1], args[2], args[3], args[4], args[5]
  begin(keys, args[7], args[8])
  reap(keys)
  local holder = redis.call('HEXISTS', keys[3], id) == 1 and redis.call('HGET', keys[7], 'instance')
  if holder and holder ~= instance and args[6] ~= '1' then
    return { 'TAKEN', holder }
  end
  local slot = take_slot(keys, id)
  if not slot then return { 'FULL' } end
  redis.call('HDEL', keys[5], slot)
  local last = tonumber(redis.call('HGET', keys[1], 'epoch') or '0')
  local epoch = text(math.max(last + 1, tonumber(args[9]) + 1, now_us()))
  redis.call('HSET', keys[1], 'epoch', epoch)
  redis.call('HSET', keys[7], 'epoch', epoch, 'instance', instance, 'state', state, 'slot', slot,
    'record', record)
  touch(keys, id, epoch, state, slot, ttl)
  emit(keys, 'op', 'join', 'worker', id, 'epoch', epoch, 'state', state, 'slot', slot,
    'record', record)
  return { 'OK', epoch, slot, redis.call('HGET', keys[1], 'layout') }
end

-- ARGV: id, epoch, ttl_ms.
local function renew(keys, args)
  local refused = fenced(keys, args[1], args[2])
  if refused then return refused end
  local held = redis.call('HMGET', keys[7], 'state', 'slot')
  touch(keys, args[1], args[2], held[1], held[2], args[3])
  return { 'OK' }
end

-- ARGV: id, epoch, ttl_ms, state.
local function set_state(keys, args)
  local refused = fenced(keys, args[1], args[2])
  if refused then return refused end
  local held = redis.call('HMGET', keys[7], 'state', 'slot')
  redis.call('HSET', keys[7], 'state', args[4])
  touch(keys, args[1], args[2], args[4], held[2], args[3])
  if held[1] ~= args[4] then
    emit(keys, 'op', 'state', 'worker', args[1], 'epoch', args[2], 'state', args[4])
  end
  return { 'OK' }
end

-- ARGV: id, epoch.
local function deregister(keys, args)
  local refused = fenced(keys, args[1], args[2])
  if refused then return refused end
  local slot = redis.call('HGET', keys[7], 'slot')
  redis.call('DEL', keys[7])
  leave(keys, args[1], args[2], slot)
  return { 'OK' }
end

-- ARGV: candidate for inc, layout. Reaps; answers inc, seq, epoch, layout,
-- {worker, "epoch:state:slot"...}, {slot, epoch...} of the dead that are not fenced yet.
local function members(keys, args)
  begin(keys, args[1], args[2])
  reap(keys)
  local meta = redis.call('HMGET', keys[1], 'inc', 'seq', 'epoch', 'layout')
  return { meta[1], meta[2] or '0', meta[3] or '0', meta[4], redis.call('HGETALL', keys[3]),
    redis.call('HGETALL', keys[5]) }
end

-- ARGV: slot, epoch. The slot is fenced everywhere. Answers 1 to the first who says so.
local function buried(keys, args)
  if redis.call('HGET', keys[5], args[1]) ~= args[2] then return { 0 } end
  return { redis.call('HDEL', keys[5], args[1]) }
end

-- ARGV: period, ms. Answers 1 to one asker in each period: it sweeps the partitions.
local function may_sweep(keys, args)
  local last = tonumber(redis.call('HGET', keys[1], 'swept') or '0')
  local now = now_ms()
  if last <= now and now < last + tonumber(args[1]) then return { 0 } end
  redis.call('HSET', keys[1], 'swept', text(now))
  return { 1 }
end

local function export(name, callback, flags)
  redis.register_function({ function_name = 'pdmesh_' .. name .. '_' .. VERSION,
    callback = callback, flags = flags })
end

-- A full store refuses new pages (they are hints) but never membership.
export('register', register, { 'allow-oom' })
export('renew', renew, { 'allow-oom' })
export('set_state', set_state, { 'allow-oom' })
export('deregister', deregister, { 'allow-oom' })
export('members', members, { 'allow-oom' })
export('buried', buried, { 'allow-oom' })
export('may_sweep', may_sweep, { 'allow-oom' })
