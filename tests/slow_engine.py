"""The game's rules once more, one car at a time and by brute force: the oracle for the fast engine.

Written for comparison, not for speed: plain floats, every wall tested by every ray, the game's own ternary search for the
projection. It shares no code and no table with racer/game, so the two can only agree by both being right.
"""

from __future__ import annotations

import math

import numpy as np


class SlowTrack:
    def __init__(self, control_points):
        self.points = [tuple(map(float, p)) for p in control_points]
        k = len(self.points)
        self.hermites = [self._hermite(i) for i in range(k)]
        self.table = [0.0]
        for i in range(k):
            previous = self._at(i, 0.0)
            for j in range(1, 21):
                here = self._at(i, j / 20)
                self.table.append(self.table[-1] + math.dist(previous, here))
                previous = here
        self.table = np.array(self.table)
        self.length = float(self.table[-1])
        self._build_walls()
        self._build_gates()

    def _hermite(self, i):
        p0, p1, p2, p3 = (np.array(self.points[(i + o) % len(self.points)][:2]) for o in (-1, 0, 1, 2))
        d01, d12, d23 = (math.sqrt(math.dist(a, b)) or 1.0 for a, b in ((p0, p1), (p1, p2), (p2, p3)))
        m1 = d12 * ((p1 - p0) / d01 - (p2 - p0) / (d01 + d12) + (p2 - p1) / d12)
        m2 = d12 * ((p2 - p1) / d12 - (p3 - p1) / (d12 + d23) + (p3 - p2) / d23)
        return p1, m1, p2, m2

    def _at(self, i, t):
        p1, m1, p2, m2 = self.hermites[i]
        h = (2 * t**3 - 3 * t**2 + 1, t**3 - 2 * t**2 + t, -2 * t**3 + 3 * t**2, t**3 - t**2)
        return tuple(h[0] * p1 + h[1] * m1 + h[2] * p2 + h[3] * m2)

    def _segment(self, s):
        s = s % self.length
        j = min(max(int(np.searchsorted(self.table, s, side="right")) - 1, 0), len(self.table) - 2)
        u = (j + (s - self.table[j]) / (self.table[j + 1] - self.table[j])) / 20
        i = min(int(u), len(self.points) - 1)
        return i, u - i

    def position(self, s):
        return self._at(*self._segment(s))

    def tangent(self, s):
        i, t = self._segment(s)
        p1, m1, p2, m2 = self.hermites[i]
        h = (6 * t**2 - 6 * t, 3 * t**2 - 4 * t + 1, -6 * t**2 + 6 * t, 3 * t**2 - 2 * t)
        d = h[0] * p1 + h[1] * m1 + h[2] * p2 + h[3] * m2
        return d / math.hypot(*d)

    def half_width(self, s):
        s = s % self.length
        k = len(self.points)
        for i in range(k):
            a, b = self.table[20 * i], self.table[20 * (i + 1)]
            if s <= b:
                share = (s - a) / (b - a)
                return self.points[i][2] * (1 - share) + self.points[(i + 1) % k][2] * share
        raise AssertionError(s)

    def _build_walls(self):
        n = self.samples = max(200, 12 * len(self.points))
        step = self.length / n
        left_cut, right_cut, widths = np.zeros(n), np.zeros(n), np.zeros(n)
        for i in range(n):
            t0, t1 = self.tangent(i * step - step / 2), self.tangent(i * step + step / 2)
            kappa = math.acos(max(-1.0, min(1.0, float(t0 @ t1)))) / step
            radius = math.inf if kappa < 1e-8 else 1 / kappa
            widths[i] = w = self.half_width(i * step) + 30
            if radius < w + 4:
                cut = w - min(w, max(4.0, radius - 4))
                (left_cut if t0[0] * t1[1] - t0[1] * t1[0] >= 0 else right_cut)[i] = cut
        box = lambda a, r: np.array([sum(a[(i + o) % n] for o in range(-r, r + 1)) / (2 * r + 1) for i in range(n)])  # noqa: E731
        for _ in range(3):
            left_cut, right_cut = box(left_cut, 10), box(right_cut, 10)
        lines = []
        for sign, cut in ((1, left_cut), (-1, right_cut)):
            line = []
            for i in range(n):
                (x, y), (tx, ty) = self.position(i * step), self.tangent(i * step)
                offset = max(4.0, widths[i] - cut[i])
                line.append((x - sign * ty * offset, y + sign * tx * offset))
            line = np.array(line)
            for _ in range(2):
                line = np.stack([box(line[:, 0], 4), box(line[:, 1], 4)], axis=1)
            lines.append(line)
        area = [abs(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))) for x, y in (line.T for line in lines)]
        self.outer, self.inner = lines if area[0] > area[1] else lines[::-1]
        self.a = np.concatenate([self.outer, self.inner])
        self.e = np.concatenate([np.roll(self.outer, -1, 0), np.roll(self.inner, -1, 0)]) - self.a

    def _build_gates(self):
        self.gates = []
        n = self.samples
        reach = max(5, math.ceil(n / 30))
        for k in range(30):
            s = k * self.length / 30
            c, middle = np.array(self.position(s)), math.floor(s / self.length * n + 0.5)
            near = [(middle + o) % n for o in range(-reach, reach + 1)]
            ends = [min(line[near], key=lambda p: math.dist(p, c)) for line in (self.inner, self.outer)]
            self.gates.append((ends[0], ends[1], self.tangent(s)))

    def project(self, x, y):
        m = max(100, math.ceil(self.length / 2))
        if not hasattr(self, "coarse"):
            self.coarse = np.array([self.position(i * self.length / m) for i in range(m)])
        i = int(np.argmin((self.coarse[:, 0] - x) ** 2 + (self.coarse[:, 1] - y) ** 2))
        best_s = i * self.length / m
        best = math.dist(self.coarse[i], (x, y))
        a, b = best_s - self.length / m, best_s + self.length / m
        for _ in range(16):
            m1, m2 = a + (b - a) / 3, b - (b - a) / 3
            d1, d2 = (math.dist(self.position(m), (x, y)) for m in (m1, m2))
            for d, s in ((d1, m1), (d2, m2)):
                if d < best:
                    best, best_s = d, s
            if d1 < d2:
                b = m2
            else:
                a = m1
        return best_s % self.length, best

    def nearest_wall(self, x, y):
        p = np.array([x, y])
        share = np.clip(((p - self.a) * self.e).sum(1) / (self.e**2).sum(1), 0, 1)
        q = self.a + share[:, None] * self.e
        d = np.hypot(*(q - p).T)
        i = int(np.argmin(d))
        return float(d[i]), float(q[i, 0]), float(q[i, 1])

    def ray(self, x, y, angle):
        dx, dy = math.cos(angle), math.sin(angle)
        wx, wy = self.a[:, 0] - x, self.a[:, 1] - y
        with np.errstate(divide="ignore", invalid="ignore"):
            det = dx * self.e[:, 1] - dy * self.e[:, 0]
            t = (wx * self.e[:, 1] - wy * self.e[:, 0]) / det
            u = (wx * dy - wy * dx) / det
        t = t[(t >= 0) & (u >= 0) & (u <= 1)]
        return min(200.0, float(t.min()) if len(t) else 200.0)


class SlowCar:
    def __init__(self, track: SlowTrack, config):
        self.track, self.weights, self.episode = track, config["weights"], config["episode"]
        (self.x, self.y), t = track.position(0.0), track.tangent(0.0)
        self.heading = math.atan2(t[1], t[0])
        self.vx = self.vy = self.yaw = self.speed = self.steer = self.throttle = self.brake = 0.0
        self.lap, self.checkpoint, self.step_count, self.stillness = 1, 0, 0, 0
        self.s, self.distance = track.project(self.x, self.y)

    def surface(self):
        over = self.distance - self.track.half_width(self.s)
        return 0 if over <= 0 else 1 if over <= 24 else 2

    def observe(self):
        rays = [self.track.ray(self.x, self.y, self.heading + math.radians(22.5 * k)) / 200 for k in range(-4, 5)]
        car = [self.speed / 160, max(-1, min(1, self.yaw / 5)), self.steer]
        return np.array([*rays, *car, self.s / self.track.length, min(1, self.distance / 80)])

    def step(self, action):
        dt = 1 / 60
        steer, throttle, brake = max(-1, min(1, action[0])), max(0, min(1, action[1])), max(0, min(1, action[2]))
        grip, sigma = ((1.0, 1.0), (0.7, 0.85), (0.5, 0.4))[self.surface()]
        self.steer += (steer - self.steer) * (1 - math.exp(-24 * dt))
        self.throttle += (throttle - self.throttle) * (1 - math.exp(-6 * dt))
        self.brake += (brake - self.brake) * (1 - math.exp(-10 * dt))
        v = self.speed
        delta = -self.steer * 0.37 / (1 + 0.025 * v)
        old = self.heading
        if v > 1:
            rear = (-0.75 * math.cos(old) + v * dt * math.cos(old), -0.75 * math.sin(old) + v * dt * math.sin(old))
            front = (
                0.75 * math.cos(old) + v * dt * math.cos(old + delta),
                0.75 * math.sin(old) + v * dt * math.sin(old + delta),
            )
            self.heading = math.atan2(front[1] - rear[1], front[0] - rear[0])
        else:
            self.heading = old + delta * v * dt
        change = self.heading - old
        self.yaw = math.atan2(math.sin(change), math.cos(change)) / dt
        force = self.throttle * 55000 * sigma
        resistance = self.brake * 50000 + 2 * v * v / sigma + 150
        if v > 1:
            force -= resistance
        elif v > 0.01:
            force -= min(resistance, v / dt * 800)
        new = max(0.0, min(160.0, v + force / 800 * dt))
        cx, cy = math.cos(self.heading), math.sin(self.heading)
        lateral = (-self.vx * cy + self.vy * cx) * (1 - grip * (0.85 - 0.30 * min(v / 160, 1)))
        self.vx, self.vy = new * cx - lateral * cy, new * cy + lateral * cx
        self.speed = math.hypot(self.vx, self.vy)
        if self.speed > 160:
            self.vx, self.vy, self.speed = self.vx * 160 / self.speed, self.vy * 160 / self.speed, 160.0
        if self.vx * cx + self.vy * cy < 0 and self.speed < 1:
            self.vx = self.vy = self.speed = 0.0
        ox, oy = self.x, self.y
        self.x, self.y = ox + self.vx * dt, oy + self.vy * dt
        self._resolve_wall(ox, oy)
        old_s = self.s
        self.s, self.distance = self.track.project(self.x, self.y)
        self._cross_gate(ox, oy)
        self.step_count += 1
        return self._reward(old_s)

    def _resolve_wall(self, ox, oy):
        move = math.dist((ox, oy), (self.x, self.y))
        parts = math.ceil(move / 0.75) if move > 0.75 else 1
        nx_, ny_ = self.x, self.y
        for i in range(1, parts + 1):
            px, py = ox + (nx_ - ox) * i / parts, oy + (ny_ - oy) * i / parts
            distance, qx, qy = self.track.nearest_wall(px, py)
            if distance < 1.0:
                break
        else:
            return
        nx, ny = ((px - qx) / distance, (py - qy) / distance) if distance > 0 else (0.0, 1.0)
        depth = 1.0 - distance
        vn = self.vx * nx + self.vy * ny
        if vn >= 0:
            self.x, self.y = px + nx * (depth + 0.5), py + ny * (depth + 0.5)
            return
        tx, ty = self.vx - vn * nx, self.vy - vn * ny
        sliding = math.hypot(tx, ty)
        ratio = sliding / self.speed if self.speed > 1e-6 else 0.0
        impact = math.acos(max(0.0, min(1.0, ratio))) / (math.pi / 2)
        self.vx, self.vy = tx * 0.7 + nx * 0.08 * self.speed, ty * 0.7 + ny * 0.08 * self.speed
        self.x, self.y = px + nx * (depth + 0.8), py + ny * (depth + 0.8)
        if impact > 0.5:
            h = 2 * (impact - 0.5)
            wall = math.atan2(ty, tx) if sliding > 0 else math.atan2(nx, -ny)
            turn = math.atan2(math.sin(wall - self.heading), math.cos(wall - self.heading))
            self.heading += turn * 0.4 * h
            self.yaw *= 1 - 0.5 * h
        self.speed = math.hypot(self.vx, self.vy)

    def _cross_gate(self, ox, oy):
        k = (self.checkpoint + 1) % 30
        a, b, direction = self.track.gates[k]
        mx, my, gx, gy = self.x - ox, self.y - oy, b[0] - a[0], b[1] - a[1]
        det = mx * gy - my * gx
        if det == 0 or mx * direction[0] + my * direction[1] <= 0:
            return
        t = ((a[0] - ox) * gy - (a[1] - oy) * gx) / det
        u = ((a[0] - ox) * my - (a[1] - oy) * mx) / det
        if 0 <= t <= 1 and 0 <= u <= 1:
            self.checkpoint = k
            self.lap += k == 0

    def _reward(self, old_s):
        w, length = self.weights, self.track.length
        ds = self.s - old_s
        ds -= length * round(ds / length)
        contact = self.track.nearest_wall(self.x, self.y)[0] < 2.0
        still = self.speed < w["stillnessSpeedThreshold"]
        self.stillness = self.stillness + 1 if still else 0
        parts = {
            "progress": ds / length * w["progress"],
            "speed": self.speed / 160 * w["speedBonus"],
            "wall": w["wallPenalty"] * contact,
            "offTrack": w["offTrackPenalty"] * (self.surface() != 0),
            "backward": w["backwardPenalty"] * (ds < 0),
            "stillness": w["stillnessPenalty"] * still,
        }
        info = {**parts, "lap": self.lap, "checkpoint": self.checkpoint, "stepCount": self.step_count}
        info |= {"wallContact": contact, "stillnessCounter": self.stillness}
        terminated = self.stillness >= self.episode["stillnessTimeoutTicks"]
        truncated = self.step_count >= self.episode["maxSteps"]
        return self.observe(), sum(parts.values()), terminated, truncated, info


def between_the_walls(track, n: int, seed: int) -> np.ndarray:
    """Random points between the walls, right up to them. (n, 2)"""
    rng = np.random.default_rng(seed)
    low, high = track.outer.min(0), track.outer.max(0)
    points = low + rng.random((n * 12, 2)) * (high - low)
    crossings = np.zeros(len(points), int)
    for a in (track.outer, track.inner):
        b = np.roll(a, -1, 0)
        spans = (a[:, 1] <= points[:, 1:]) != (b[:, 1] <= points[:, 1:])
        with np.errstate(all="ignore"):
            x = a[:, 0] + (points[:, 1:] - a[:, 1]) * (b[:, 0] - a[:, 0]) / (b[:, 1] - a[:, 1])
        crossings += (spans & (x > points[:, :1])).sum(1)
    return points[crossings % 2 == 1][:n]
