"""The moving picture of docs/view.html in README: GSPO and GRPO from the same supervised warm-up.

    python experiments/view_gif.py

The page is filmed in Debian's chromium (pip install selenium, apt-get install chromium
chromium-driver), batch by batch. Then the focus walks along the tokens of one response, as with
the arrow keys. Writes docs/figures/view.gif.
"""

import argparse
import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs/figures/view.gif"
WIDTH, HEIGHT, SCALE = 1180, 860, 0.8     # the window, and how much smaller the picture is
SHOWN = 700                             # milliseconds of a batch
READ = 2000                             # of a picture to read
TOKEN = 450                             # of a token


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
        browser.get(page.as_uri())
        middle = browser.execute_script("return state.step")
        browser.execute_script("goTo(STEPS[0])")
        shoot(READ)
        for step in browser.execute_script("return STEPS.slice(1, 12)"):
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


def main():
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        sys.exit("view_gif.py: chromium is not there: apt-get install chromium chromium-driver")
    images, times = zip(*film(ROOT / "docs/view.html"))
    together = Image.new("RGB", (images[0].width, images[0].height * len(images)))
    for i, image in enumerate(images):
        together.paste(image, (0, i * image.height))
    palette = together.quantize(255)                # one for all pictures makes the file smaller
    first, *rest = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    first.save(FILE, save_all=True, append_images=rest, duration=times, loop=0, optimize=True)
    print(f"{FILE.relative_to(ROOT)}: {len(images)} pictures, {FILE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
