"""The moving picture of `eval.py view` in README: GSPO and GRPO from the same cold start.

    python experiments/view_gif.py                    trains both for twelve batches, two minutes
    python experiments/view_gif.py runs/a runs/b      shows two runs that are there

The page is filmed in Debian's chromium (pip install selenium, apt-get install chromium
chromium-driver), batch by batch. Then the focus walks along the tokens of one response, as with
the arrow keys. Writes docs/figures/view.gif.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs/figures/view.gif"
WIDTH, HEIGHT, SCALE = 1180, 825, 0.8     # the window, and how much smaller the picture is
STEPS = 12                         # rollout batches of each run
SHOWN = 700                             # milliseconds of a batch
READ = 2000                             # of a picture to read
TOKEN = 450                             # of a token


def trained(folder):
    """Train GSPO and GRPO in `folder` -> their run folders."""
    for algorithm in ("gspo", "grpo"):
        subprocess.run([sys.executable, ROOT / "train.py", "--device", "cpu", "--steps", str(STEPS),
                        "--algorithm", algorithm, "--eval_samples", "0", "--output_dir",
                        f"runs/{algorithm}"], cwd=folder, check=True)
    return ["runs/gspo", "runs/grpo"]


def film(page):
    """The pictures of the page, as [(image, milliseconds)]."""
    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(word)
    options.binary_location = shutil.which("chromium")
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    pictures = []

    def shoot(milliseconds):
        image = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
        pictures.append((image.convert("RGB"), milliseconds))

    with webdriver.Chrome(options, service) as browser:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": WIDTH, "height": HEIGHT, "deviceScaleFactor": SCALE, "mobile": False})
        browser.get(Path(page).resolve().as_uri())
        middle = browser.execute_script("return state.step")
        browser.execute_script("goTo(STEPS[0])")
        shoot(READ)
        for step in browser.execute_script("return STEPS.slice(1)"):
            browser.execute_script("goTo(arguments[0])", step)
            shoot(SHOWN)
        browser.execute_script("goTo(arguments[0])", middle)
        shoot(READ)
        browser.execute_script("document.querySelector('.panels [tabindex=\"0\"]').focus()")
        shoot(TOKEN)
        for last in [False] * 7 + [True]:
            ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
            shoot(READ if last else TOKEN)
    return pictures


def main(runs):
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        sys.exit("view_gif.py: chromium is not there: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory() as folder:
        place = Path.cwd() if runs else folder
        runs = runs or trained(folder)
        page = os.path.join(folder, "page.html")
        subprocess.run([sys.executable, ROOT / "eval.py", "view", *runs, "--output", page],
                       cwd=place, check=True)
        images, times = zip(*film(page))
    together = Image.new("RGB", (images[0].width, images[0].height * len(images)))
    for i, image in enumerate(images):
        together.paste(image, (0, i * image.height))
    palette = together.quantize(255)                # one for all pictures makes the file smaller
    first, *rest = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    first.save(FILE, save_all=True, append_images=rest, duration=times, loop=0, optimize=True)
    print(f"{FILE.relative_to(ROOT)}: {len(images)} pictures, {FILE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    help_form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=help_form)
    parser.add_argument("runs", nargs="*", help="run folders (default: a new run of each)")
    main(parser.parse_args().runs)
