"""Telemetry, comparisons and the page: what is shown is what was driven, to the tick."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MODULES, ROOT, TINY, both, evaluate_run

import racer
from racer.compare import Args, names_of, run_comparison, run_races
from racer.game.config import DEFAULT_CONFIG_PATH
from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS, load_track
from racer.training.evaluation import drive_lap, evaluate
from racer.training.references import BEST_LAP_TICKS, best_known_lap, full_throttle
from racer.view.page import race_page
from racer.view.telemetry import COLUMNS, PLACE, LapTrace, Race, load_laps, save_laps
from racer_env import RacerVectorEnv

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def weave(obs):
    """A driver that is slower than the hand-written one, and leaves the road at times."""
    actions = full_throttle(obs, 1.4)
    actions[:, 0] += 0.4 * np.sin(40 * obs[:, 12])
    return actions


@pytest.fixture(scope="module")
def race():
    laps = [
        drive_lap("weave", weave, "track-01"),
        best_known_lap("track-01"),
        drive_lap("plain", full_throttle, "track-01"),
    ]
    return Race(laps)


# -- telemetry ---------------------------------------------------------------------------------------------------------


def test_the_columns_are_what_the_engine_had_at_every_tick():
    """Also off the road and along a wall; only `side` says more than the engine."""
    sim, places, expected = RacerSim(1, ["track-02"]), [], []
    for tick in range(400):
        places.append([getattr(sim, name)[0] for name in PLACE])
        expected.append(
            [tick, sim.s[0], sim.centre_distance[0], sim.centre_distance[0] > sim.half_width[0], sim.wall_contact[0]]
        )
        sim.step([[0.08, 1.0, 0.0]], observing=False)
    lap, (tick, arc, distance, off_road, wall) = LapTrace.of("", "track-02", np.array(places)), np.array(expected, float).T
    assert tuple(lap.columns) == COLUMNS and 0 < off_road.mean() < 1 and 0 < wall.mean() < 1
    for name, values in {"tick": tick, "time": tick / 60, "off_road": off_road}.items():
        np.testing.assert_allclose(lap.columns[name], values, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(lap.columns["arc"], arc, atol=1e-3, err_msg="the engine's place is one step of Newton's away")
    np.testing.assert_allclose(np.abs(lap.columns["side"]), distance, atol=1e-6)
    assert (lap.columns["wall_contact"] != wall).sum() <= 1, "before the first move the engine has not looked"
    np.testing.assert_array_equal(np.column_stack([lap.columns[name] for name in PLACE]), places)
    assert not lap.complete and lap.progress[-1] == pytest.approx(lap.progress.max())


def test_side_is_positive_to_the_left_of_the_centreline():
    track, s = load_track("track-01"), np.array([100.0, 110.0])
    along = track.tangent(s)
    left = track.position(s) + 7 * np.column_stack([-along[:, 1], along[:, 0]])
    np.testing.assert_allclose(
        LapTrace.of("", "track-01", np.column_stack([left, np.zeros((2, 5))])).columns["side"], 7, atol=0.05
    )


def test_rolling_back_over_the_line_is_no_lap():
    track = load_track("track-01")
    s = np.concatenate([np.arange(0, 40, 2.0), np.arange(40, -20, -2.0)]) % track.length
    lap = LapTrace.of("", "track-01", np.column_stack([track.position(s), np.zeros((len(s), 5))]))
    assert not lap.complete and lap.progress[-1] == pytest.approx(40 / track.length, abs=1e-3)


def test_laps_survive_their_file(tmp_path, race):
    save_laps(tmp_path / "laps.csv", race.laps)
    again = load_laps(tmp_path / "laps.csv")
    assert [lap.seconds for lap in again] == [lap.seconds for lap in race.laps]
    for a, b in zip(again, race.laps, strict=True):
        assert a.complete == b.complete and a.track_id == b.track_id
        for name in COLUMNS:
            np.testing.assert_allclose(a.columns[name], b.columns[name], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("track", TRACKS)
def test_the_best_lap_known_is_the_recorded_one(track):
    lap = best_known_lap(track)
    assert lap.complete and lap.seconds * 60 == pytest.approx(BEST_LAP_TICKS["clean"][track]) and lap.off_road_share == 0


def test_every_driven_lap_of_an_episode_has_its_ticks():
    with contextlib.closing(RacerVectorEnv(1, render_mode="rgb_array")) as envs:
        (episode,) = evaluate(full_throttle, envs, ["track-01"])
    laps = episode.lap_traces()
    assert [len(lap.progress) - 1 for lap in laps] == [lap.ticks for lap in episode.laps] and len(laps) >= 6
    assert all(lap.complete for lap in laps)
    off_road = [int(lap.columns["off_road"][1:].sum()) for lap in laps]
    assert off_road == [lap.off_road for lap in episode.laps] and sum(off_road) > 0


# -- comparisons -------------------------------------------------------------------------------------------------------


def test_sector_times_and_gaps_add_up_to_the_laps(race):
    assert race.reference.name == "best known" and all(lap.complete for lap in race.laps)
    for lap, sectors in zip(race.laps, race.sectors, strict=True):
        assert sectors.sum() == pytest.approx(lap.seconds, abs=1e-9)
        assert race.gap(lap, 1.0) == pytest.approx(lap.seconds - race.reference.seconds, abs=1e-9) and race.gap(lap, 0.0) == 0
        assert np.isfinite(race.gap(lap, np.linspace(0, 1, 500))).all()


def test_the_place_that_costs_most_is_found():
    """The best lap known, but standing still for half a second at 43 % of the lap."""
    best = best_known_lap("track-03")
    at = int(np.searchsorted(best.progress, 0.43))
    columns = {name: np.insert(values, at, np.repeat(values[at], 30)) for name, values in best.columns.items()}
    race = Race([LapTrace("stops", "track-03", columns), best])
    expected = "stops is 0.500 s slower than best known; it loses most from 40 to 50 % of the lap: 0.500 s."
    assert race.losses() == [expected]
    lost = race.laps[0].lost_to(best)
    assert lost[at - 5] > 5 and abs(lost[: at // 2]).max() < 1e-6
    row, sectors, _ = (line for line in race.table().split("\n") if line.startswith("stops"))
    assert "+0.500" in row and f"{best.seconds + 0.5:.3f}" in row and sectors.count("*") == 9
    assert max(map(len, race.table().split("\n"))) <= 100


def test_a_driver_that_does_not_finish_is_shown_as_far_as_it_came(tmp_path):
    race = Race(
        [
            drive_lap("brake", lambda obs: np.tile([0.0, 0.3, 0.29], (len(obs), 1)), "track-01"),
            best_known_lap("track-01"),
        ]
    )
    assert not race.laps[0].complete and race.reference is race.laps[1]
    assert re.search(r"brake +no lap", race.table()) and "brake did not finish a lap: it came to " in race.table()
    assert '"complete":false' in race_page("x", [race])


@both
def test_a_loaded_driver_drives_one_car_and_many_as_its_agent_does(trained, name):
    driver = racer.load_driver(trained(name))
    observations = RacerVectorEnv(3, start="anywhere").reset(seed=1)[0]
    many = driver(observations)
    assert many.shape == (3, 3) and driver(observations[0]).shape == (3,) and driver.steps >= 512
    np.testing.assert_allclose(driver(observations[1]), many[1], atol=1e-6)
    np.testing.assert_array_equal(racer.load_driver(trained(name) / "best.pt")(observations), many)
    assert driver.args.tracks == ("track-01",)


def test_compare_takes_drivers_of_every_kind(trained, tmp_path, capsys, race):
    save_laps(tmp_path / "mine.csv", race.laps[:1])
    words = (str(trained("ppo")), str(trained("sac") / "best.pt"), str(tmp_path / "mine.csv"), "best", "hand-written", "limit")
    out = tmp_path / "race.html"
    run_comparison(Args(words, out=out))
    shown = capsys.readouterr().out
    assert (
        all(f"\n{name} " in shown for name in ("ppo", "sac", "mine", "best known", "hand-written", "limit"))
        and str(out) in shown
    )
    assert "<script>" in out.read_text() and out.stat().st_size < 500_000
    run_comparison(Args(words[2:4], png=tmp_path / "race.png", gif=tmp_path / "race.gif"))
    assert (tmp_path / "race.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "race.gif").read_bytes()[:4] == b"GIF8"


def test_bad_words_are_one_clear_line(trained, tmp_path, race):
    save_laps(tmp_path / "mine.csv", race.laps[:1])
    (tmp_path / "cut.csv").write_text((tmp_path / "mine.csv").read_text()[:900])
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    save_laps(tmp_path / "empty.csv", [])
    for words, tracks, message in (
        ((), (), "no drivers"),
        (("nothing",), (), "nothing does not exist"),
        ((str(trained("ppo") / "metrics.csv"),), (), "no column 'track'"),
        ((str(tmp_path / "other.csv"),), (), "no column 'track'"),
        ((str(tmp_path / "cut.csv"),), (), "not a complete telemetry file"),
        ((str(tmp_path / "empty.csv"),), (), "empty has laps on no track"),
        (("best",), ("random-3",), "no best lap is known on random-3"),
        ((str(tmp_path / "mine.csv"), "best"), ("track-02",), "mine has laps on track-01, none on track-02"),
        (("best",), ("track-9",), "track-9"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            run_races(words, tracks)
    command = [sys.executable, "-m", "racer.compare", "nothing"]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.strip().count("\n") == 0 and "nothing does not exist" in failed.stderr


def test_a_copy_of_a_trainer_is_compared_with_the_original(trained, tmp_path):
    """And with one whose name is that of a reference: it is not taken for it."""
    mine = tmp_path / "limit"
    shutil.copytree(trained("ppo"), mine)
    copy, text = mine / "my_ppo.py", (ROOT / "ppo_racer.py").read_text()
    copy.write_text(text.replace("nn.ReLU()", "nn.Tanh()"))
    for file in mine.glob("*.pt"):
        torch.save({**torch.load(file, weights_only=True), "trainer": "my_ppo.py"}, file)
    words = (str(trained("ppo")), str(mine))
    with pytest.raises(ValueError, match=rf"was trained by my_ppo\.py.*--trainer {copy}"):
        run_races(words)
    (race,) = run_races((*words, "best"), trainer=(copy,))
    assert names_of(words) == ["ppo", str(mine)] and race.reference.name == "best known"
    ours, theirs = race.laps[:2]
    assert not np.array_equal(ours.columns["steer"][:50], theirs.columns["steer"][:50]), "another activation"
    assert [race.colour(lap) for lap in race.laps] == [0, 4, 1]


@both
def test_an_evaluation_writes_its_laps(trained, tmp_path, name, monkeypatch):
    monkeypatch.setattr(MODULES[name].Agent, "drive", lambda self, obs: full_throttle(obs))
    file = tmp_path / "laps.csv"
    (result,) = evaluate_run(trained(name), telemetry=file, config_path=DEFAULT_CONFIG_PATH)
    laps = load_laps(file)
    assert len(laps) == result["laps"] >= 6 and min(lap.seconds for lap in laps) == pytest.approx(result["best_lap_sec"])


def test_a_run_leaves_its_lap_and_a_race_with_its_first_evaluation(tmp_path, monkeypatch):
    ppo, gains, real = MODULES["ppo"], [0.5, 1.4], MODULES["ppo"].rollout
    monkeypatch.setattr(ppo, "rollout", lambda *arguments: (gains.insert(0, gains.pop()), real(*arguments)))
    monkeypatch.setattr(ppo.Agent, "drive", lambda self, obs: full_throttle(obs, gains[0]))
    settings = {
        **TINY["ppo"],
        "run_dir": tmp_path,
        "run_name": "run",
        "total_timesteps": 1024,
        "eval_every": 512,
        "pictures": True,
    }
    result = ppo.train(ppo.Args(**settings))
    (lap,) = load_laps(tmp_path / "run" / "lap-track-01.csv")
    assert result["finished"] and lap.complete
    data = page_data(tmp_path / "run" / "race.html")
    (race,) = data["races"]
    names = [driver["name"] for driver in race["drivers"]]
    assert names == ["this run", "best known", "first evaluation"] and data["title"] == "run"
    assert len(race["drivers"][0]["x"]) == len(lap.progress)


# -- the page ----------------------------------------------------------------------------------------------------------


def page_data(path: Path) -> dict:
    return json.loads(re.search(r"^const DATA = (.*);$", path.read_text(encoding="utf-8"), re.M)[1])


def test_names_cannot_break_the_page(race):
    lap = LapTrace("</script><b>&", "track-01", race.laps[0].columns)
    text = race_page("a title", [Race([lap])])
    assert "</script><b>" not in text and text.count("</script>") == 1


def test_four_drivers_on_the_longest_track_fit_into_half_a_megabyte():
    best = best_known_lap("track-02")
    assert len(race_page("four", [Race([best] * 4)]).encode()) < 500_000


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with: pip install playwright")
    if not CHROMIUM:
        pytest.skip("the page is tested in Chromium; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, race, tmp_path):
    """The page of a race, opened from the disk. It says nothing in the console and asks no network for anything."""
    file, said, asked = tmp_path / "race.html", [], []
    file.write_text(race_page("a race", [race, Race([best_known_lap("track-03")])]), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(file.as_uri())
    yield tab
    assert not said and all(url.startswith(("file:", "data:")) for url in asked)
    tab.close()


def test_the_page_plays_scrubs_and_ends_with_the_laps_times(page, race):
    page.wait_for_function("state.time > 0.2")
    page.keyboard.press("Space")
    page.wait_for_function("!state.playing && $('play').textContent === 'play'")
    before = page.evaluate("state.time")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("state.time") == pytest.approx(before + 0.1)
    for i, lap in enumerate(race.laps):
        assert page.evaluate(f"timeAt(drivers[{i}], 1)") == pytest.approx(lap.seconds, abs=1e-9)
        gap = page.evaluate(f"gapAt(drivers[{i}], 1)")
        assert gap == pytest.approx(lap.seconds - race.reference.seconds, abs=1e-9)
        middle = page.evaluate(f"gapAt(drivers[{i}], 0.437)")
        assert middle == pytest.approx(float(race.gap(lap, 0.437)), abs=1e-4)
    slowest = max(lap.seconds for lap in race.laps)
    page.evaluate(f"jump({slowest})")
    page.wait_for_function(f"$('clock').textContent === '{slowest:.2f} s'")
    assert float(page.evaluate("$('time').max")) == pytest.approx(slowest) and page.locator("#ends i").count() == 3
    page.locator("#play").click()
    page.wait_for_function("state.playing && state.time < 1")
    page.evaluate("state.rate = 4")
    page.wait_for_function("state.time > 2")


def test_hovering_a_chart_or_the_track_stands_all_cars_at_one_share(page, race):
    box = page.locator("#cursor").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 200)
    page.wait_for_function("state.share !== null")
    share = page.evaluate("state.share")
    assert 0.4 < share < 0.6
    for i, lap in enumerate(race.laps):
        assert page.evaluate(f"secondsOf(drivers[{i}])") == pytest.approx(float(lap.time_at(share)), abs=1e-4)
    page.mouse.move(5, 5)
    page.wait_for_function("state.share === null")
    x, y = page.evaluate("""(() => { const i = 200, box = map.getBoundingClientRect();
        return [box.x + (map.width / 2 + (reference.x[i] - view.x) * view.scale) / devicePixelRatio,
                box.y + (map.height / 2 - (reference.y[i] - view.y) * view.scale) / devicePixelRatio]; })()""")
    page.mouse.move(x, y)
    page.wait_for_function("state.share !== null && Math.abs(state.share - reference.progress[200]) < 0.02")


def test_every_choice_of_the_page_draws(page, race):
    """Each changes the picture; the tables show the laps."""
    cells = page.locator("#drivers tr").all_inner_texts()
    assert all(f"{lap.seconds:.3f}" in text and lap.name in text for lap, text in zip(race.laps, cells[1:], strict=True))
    assert page.locator("#sectors td.best").count() >= 10 and page.locator("#losses li").count() == 2
    page.evaluate("play(false); jump(3)")
    seen = set()
    for control, value in (
        ("colour", "speed"),
        ("colour", "steer"),
        ("colour", "lost"),
        ("focus", "2"),
        ("follow", "1"),
    ):
        page.select_option(f"#{control}", value)
        page.wait_for_function("!dirty")
        seen.add(page.evaluate("map.toDataURL()"))
    assert len(seen) == 5
    page.select_option("#reference", "0")
    assert page.locator("#drivers tr").nth(2).inner_text().count("\N{MINUS SIGN}") == 1, "the best known is ahead of it"
    page.select_option("#track", "1")
    page.wait_for_function("race.track.name === 'track-03' && drivers.length === 1 && state.colour === 'speed'")
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("!dirty")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "a phone needs not scroll sideways"
